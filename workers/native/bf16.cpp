// All functions for bf16.

#include "common.h"

using Element = bf16;
#define EXPORT(name) baton_##name##_bf16

#ifdef __AVX512BF16__
#include "block_bf16.h"
#include "linear.h"
#else
#include "block_fp32.h"
#endif

#include "attention.h"
#include "elementwise.h"
#include "select.h"
