// Rows whose largest score a bias or ALiBi has put far from 0: all keys that a row sees may be masked by -1e4 or -1e9, or lie
// far from its position. In f32 such a score has lost what the product of Q and K was, by 2^-24 of itself: of -1e4 weights come
// out wrong by 3e-4, of -1e9 all alike. So these rows are done once more (with care: the tile and the decode route), each of
// their scores in double, less the row's maximum of the first time. Not beyond 2^60, where doubles lose the product too; nor
// with sinks, to which a weight of such a row is as nothing, or they to it.
#pragma once

#include "score.hpp"

namespace manyhead::MH_ISA {
namespace {

template <class T>
MH_INLINE bool may_lie_far(const kernel_call& c) {
  return sizeof(T) == 4 && c.may_lie_far;
}

// Of a row's maximum, in natural units.
template <class T>
MH_INLINE bool lies_far(T top) {
  const T distance = top < 0 ? -top : top;
  return distance > T(256) && distance < T(0x1p60);
}

// Of a row's scores s, `stride` apart, those that are not closed: made anew of the products, and less `shift`. Returns the largest.
template <class T>
__attribute__((noinline)) T bring_near(const kernel_call& c, const positions& at, const tile_at& t, const row_of& r,
                                       double shift, const T* products, T* s, int64_t stride) {
  alignas(64) T bias[most_tile_keys];
  const int64_t keys = t.keys(), with_bias = c.bias != nullptr ? biased_keys(c, t) : 0;
  if (with_bias > 0) {
    const int64_t first = bias_offset(c, t, r) + t.begin * c.bias_strides[3];
    widen_any<T>(c.bias_dtype, c.bias, first, c.bias_strides[3], with_bias, bias);
  }
  const double slope = c.alibi_slopes != nullptr ? static_cast<double>(slope_of<T>(c, t, r)) : 0.0;
  T top = -infinity<T>;
  for (int64_t k = 0; k < keys; ++k) {
    if (s[k * stride] == -infinity<T>) continue;
    auto x = static_cast<double>(products[k * stride]);
    if (c.softcap > 0) x = c.softcap * ::tanh(x / c.softcap);
    const auto distance = static_cast<double>(r.query + at.offset - t.begin - k);
    x -= slope * (c.alibi_mode != MH_ALIBI_SIGNED && distance < 0 ? -distance : distance);
    if (k < with_bias) x += static_cast<double>(bias[k]);
    const T near = static_cast<T>(x - shift);
    s[k * stride] = near;
    if (near > top) top = near;
  }
  return top;
}

}  // namespace
}  // namespace manyhead::MH_ISA
