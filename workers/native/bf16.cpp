// All functions for bf16.

#include "common.h"

using Element = bf16;
#define EXPORT(name) baton_##name##_bf16

#if defined(__AMX_BF16__)
#include "block_bf16.h"
#include "products_amx.h"
#elif defined(__AVX512BF16__)
#include "block_bf16.h"
#include "products_avx512.h"
#else
#include "block_fp32.h"
#include "products_fp32.h"
#endif

#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "linear.h"
#include "select.h"
