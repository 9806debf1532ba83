// The rule by which positions say what keys a query may attend, for plans and for kernels.
#pragma once

#include "kernel_api.hpp"

namespace manyhead {

struct key_range {
  int64_t begin, end;
};

namespace {  // compiled for several instruction sets: nothing here may be shared between objects

inline int64_t index_at(const void* p, int32_t type, int64_t i) {
  return type == MH_INDEX_I32 ? static_cast<const int32_t*>(p)[i] : static_cast<const int64_t*>(p)[i];
}

// The position of query i is i + offset, where `used` keys are in use and an offset may be given.
inline int64_t offset_of(int32_t align, int64_t used, int64_t q_len, int64_t given) {
  return align == MH_ALIGN_BOTTOM_RIGHT ? used - q_len : align == MH_ALIGN_OFFSET ? given : 0;
}

// The keys that a position may attend as far as causality and the window go. Both ends grow with it.
template <class Problem>
inline key_range reach_of(const Problem& p, int64_t position) {
  constexpr int64_t unlimited = int64_t{1} << 62;
  key_range r{-unlimited, unlimited};
  if (p.causal) r.end = position + 1;
  if (p.window_right >= 0 && position + p.window_right + 1 < r.end) r.end = position + p.window_right + 1;
  if (p.window_left >= 0) r.begin = position - p.window_left;
  return r;
}

// The key that chunks of a split are counted from, where the first query may attend none before `first`: with a window that of the
// tile that holds it. A step that sees 128 keys at the end of 131072 would else have 256 chunks, all but one of them empty.
template <class Problem>
inline int64_t chunks_from(const Problem& p, int64_t first, int64_t block_kv) {
  return p.window_left < 0 || p.extra_keys > 0 ? 0 : first / block_kv * block_kv;
}

}  // namespace
}  // namespace manyhead
