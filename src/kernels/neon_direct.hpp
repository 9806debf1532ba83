// xsimd takes NEON's instructions from tables of function pointers, of which GCC makes calls: one for each sum, product
// and comparison of vectors. The same without a table, for what the kernels use.
#pragma once

#include <arm_neon.h>

#include <xsimd/xsimd.hpp>

namespace xsimd::kernel {
#define MH_DIRECT(op, result, T, intrinsic)                                               \
  template <>                                                                             \
  XSIMD_INLINE result<T, neon64> op(batch<T, neon64> const& a, batch<T, neon64> const& b, \
                                    requires_arch<neon>) noexcept {                       \
    return intrinsic(a, b);                                                               \
  }
#define MH_DIRECT_SELECT(T, suffix)                                                                   \
  template <>                                                                                         \
  XSIMD_INLINE batch<T, neon64> select(batch_bool<T, neon64> const& which, batch<T, neon64> const& a, \
                                       batch<T, neon64> const& b, requires_arch<neon>) noexcept {     \
    return vbslq_##suffix(which, a, b);                                                               \
  }
#define MH_DIRECT_CAST(To, From, arch, intrinsic)                                                     \
  template <>                                                                                         \
  XSIMD_INLINE batch<To, neon64> bitwise_cast(batch<From, neon64> const& x, batch<To, neon64> const&, \
                                              requires_arch<arch>) noexcept {                         \
    return intrinsic(x);                                                                              \
  }
#define MH_DIRECT_INTEGERS(T, suffix)                 \
  MH_DIRECT(add, batch, T, vaddq_##suffix)            \
  MH_DIRECT(sub, batch, T, vsubq_##suffix)            \
  MH_DIRECT(bitwise_and, batch, T, vandq_##suffix)    \
  MH_DIRECT(bitwise_or, batch, T, vorrq_##suffix)     \
  MH_DIRECT(bitwise_xor, batch, T, veorq_##suffix)    \
  MH_DIRECT(bitwise_andnot, batch, T, vbicq_##suffix) \
  MH_DIRECT_SELECT(T, suffix)
#define MH_DIRECT_ORDER(T, suffix)             \
  MH_DIRECT(eq, batch_bool, T, vceqq_##suffix) \
  MH_DIRECT(lt, batch_bool, T, vcltq_##suffix) \
  MH_DIRECT(le, batch_bool, T, vcleq_##suffix) \
  MH_DIRECT(gt, batch_bool, T, vcgtq_##suffix) \
  MH_DIRECT(min, batch, T, vminq_##suffix)     \
  MH_DIRECT(max, batch, T, vmaxq_##suffix)
MH_DIRECT(add, batch, float, vaddq_f32)
MH_DIRECT(sub, batch, float, vsubq_f32)
MH_DIRECT(mul, batch, float, vmulq_f32)
MH_DIRECT_SELECT(float, f32)
MH_DIRECT_ORDER(float, f32)
MH_DIRECT_INTEGERS(uint32_t, u32)
MH_DIRECT_INTEGERS(int32_t, s32)
MH_DIRECT_INTEGERS(uint64_t, u64)
MH_DIRECT_INTEGERS(int64_t, s64)
MH_DIRECT_ORDER(uint32_t, u32)
MH_DIRECT_ORDER(int32_t, s32)
MH_DIRECT_CAST(uint32_t, float, neon, vreinterpretq_u32_f32)
MH_DIRECT_CAST(float, uint32_t, neon, vreinterpretq_f32_u32)
MH_DIRECT_CAST(uint32_t, int32_t, neon, vreinterpretq_u32_s32)
MH_DIRECT_CAST(int32_t, uint32_t, neon, vreinterpretq_s32_u32)
MH_DIRECT_CAST(uint64_t, int64_t, neon, vreinterpretq_u64_s64)
MH_DIRECT_CAST(int64_t, uint64_t, neon, vreinterpretq_s64_u64)
MH_DIRECT_CAST(uint64_t, double, neon64, vreinterpretq_u64_f64)
MH_DIRECT_CAST(double, uint64_t, neon64, vreinterpretq_f64_u64)
#undef MH_DIRECT_ORDER
#undef MH_DIRECT_INTEGERS
#undef MH_DIRECT_CAST
#undef MH_DIRECT_SELECT
#undef MH_DIRECT
}  // namespace xsimd::kernel
