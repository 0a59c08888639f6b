// All functions for fp32.

using Element = float;
#define EXPORT(name) baton_##name##_fp32

#include "block_fp32.h"

#include "attention.h"
#include "elementwise.h"
#include "select.h"
