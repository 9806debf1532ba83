// Masks that heads share, and biases that are masks, looked at once for all heads, before the tasks: rows of bits (kernel_api.hpp:
// openings). Each head would read them again, a bias 32 times as many bytes as bits. On Zen 5, 8 heads of 64, a causal bias of
// 1024 queries and keys: its numbers in L2 took a tenth of the time to read and pushed K and V out of L1.
#pragma once

#include "closing.hpp"

namespace manyhead::MH_ISA {
namespace {

// Keys that some query of the task may attend: of its batch entry, or of any, where entries share.
MH_INLINE key_range keys_of_queries(const kernel_call& c, const openings& open, const kernel_task& t) {
  const bool entries_differ = open.batch_words == 0 && (c.seqused_k != nullptr || c.q_offsets != nullptr);
  key_range all{c.kv_len, 0};
  for (int64_t b = entries_differ ? 0 : t.batch; b <= (entries_differ ? c.batch - 1 : t.batch); ++b) {
    const positions at = positions_of(c, b);
    all = joined(all, {range_of(c, at, t.row_begin).begin, range_of(c, at, t.row_end - 1).end});
  }
  return all;
}

// What keys of a row of bits are like: looked at from both ends, and between them as far as all are open.
MH_INLINE void see_bits(const uint32_t* words, const key_range& keys, opening& of) {
  const auto word_of = [&](int64_t i) MH_INLINE_LAMBDA {
    return words[i] & bit_range(keys.begin - i * word_keys, keys.end - i * word_keys);
  };
  int64_t first = keys.begin / word_keys, last = (keys.end - 1) / word_keys;
  while (first <= last && word_of(first) == 0) ++first;
  if (first > last) return;
  while (word_of(last) == 0) --last;
  of.any_begin = first * word_keys + __builtin_ctz(word_of(first));
  of.any_end = (last + 1) * word_keys - __builtin_clz(word_of(last));
  for (int64_t i = first; i <= last; ++i) {
    const uint32_t full = bit_range(of.any_begin - i * word_keys, of.any_end - i * word_keys);
    if ((words[i] & full) != full) return;
  }
  of.all_begin = of.any_begin;
  of.all_end = of.any_end;
}

MH_INLINE int64_t rows_to_look_at(const openings& open, const kernel_task& t) {
  return open.query_words == 0 ? 1 : t.row_end - t.row_begin;
}

// look_at(query, first, words, keys, of): fills the words of a query for keys from `first` on, most_tile_keys of them at most, and
// says what a bias is like. Words of keys that no query may attend stay as they are. A task's queries are whole blocks, but for the
// last.
template <class Look>
MH_INLINE void open_rows(const kernel_call& c, const openings& open, const kernel_task& t, Look look_at) {
  const key_range keys = keys_of_queries(c, open, t);
  const int64_t begin = round_down<word_keys>(keys.begin), masked = c.kv_len - c.extra_keys;
  const int64_t words = (c.kv_len + word_keys - 1) / word_keys;
  const int64_t end = t.row_begin + rows_to_look_at(open, t);
  opening block = opening_of_none(c);
  for (int64_t query = t.row_begin; query < end; ++query) {
    uint32_t* const row = row_of_openings(open, t.batch, query);
    for (int64_t i = masked / word_keys; c.extra_keys > 0 && i < words; ++i) row[i] = ~0U;
    opening of{c.kv_len, 0, c.kv_len, 0, false, false};
    for (int64_t first = begin; first < keys.end; first += most_tile_keys)
      look_at(query, first, row + first / word_keys, min_of(most_tile_keys, keys.end - first), of);
    see_bits(row, keys, of);
    block = joined(block, of);
    if ((query + 1) % opening_queries != 0 && query + 1 < end) continue;
    open.blocks[t.batch * open.batch_blocks + query / opening_queries] = block;
    block = opening_of_none(c);
  }
}

// A mask of bytes, of a batch entry.
MH_INLINE void open_bytes(const kernel_call& c, const openings& open, const kernel_task& t, const uint8_t* mask,
                          int64_t query_stride, int64_t stride) {
  const auto look_at = [&](int64_t query, int64_t first, uint32_t* words, int64_t keys, opening&) MH_INLINE_LAMBDA {
    const uint8_t* const row = mask + query * query_stride + first * stride;
    const int64_t whole = stride == 1 ? keys / word_keys : 0;
    for (int64_t i = 0; i < whole; ++i) words[i] = nonzero_bytes(row + i * word_keys, 1, word_keys);
    for (int64_t k = whole * word_keys; k < keys; k += word_keys) {
      const int64_t n = min_of(word_keys, keys - k);
      words[k / word_keys] = nonzero_bytes(row + k * stride, stride, n) | ~bit_range(0, n);
    }
  };
  open_rows(c, open, t, look_at);
}

[[maybe_unused]] void open_mask(const kernel_call* c, const kernel_task* t) {
  open_bytes(*c, c->mask_open, *t, c->mask + t->batch * c->mask_strides[0], c->mask_strides[2], c->mask_strides[3]);
}

[[maybe_unused]] void open_key_mask(const kernel_call* c, const kernel_task* t) {
  open_bytes(*c, c->key_mask_open, *t, c->key_mask + t->batch * c->key_mask_strides[0], 0, c->key_mask_strides[1]);
}

template <class T>
void open_bias(const kernel_call* call, const kernel_task* task) {
  const kernel_call& c = *call;
  const openings& open = c.bias_open;
  const int64_t size = bias_bytes(c), queries = task->row_end - task->row_begin;
  const tile_at all{task->batch, 0, task->row_begin * c.group, queries * c.group, 0, c.kv_len};
  if (!corners_may_close<T>(c, all)) {  // rows that are not looked at hide what they hide by being added
    const int64_t rows = rows_to_look_at(open, *task);
    memset(row_of_openings(open, task->batch, task->row_begin), 0xff,
           static_cast<size_t>(rows * open.row_words) * sizeof(uint32_t));
    opening* const block = open.blocks + task->batch * open.batch_blocks + task->row_begin / opening_queries;
    for (int64_t i = 0; i * opening_queries < rows; ++i) block[i] = {0, c.kv_len, c.kv_len, 0, false, true};
    return;
  }
  const char* const bias = static_cast<const char*>(c.bias) + task->batch * c.bias_strides[0] * size;
  const auto look_at = [&](int64_t query, int64_t first, uint32_t* words, int64_t keys, opening& of) MH_INLINE_LAMBDA {
    alignas(64) T copy[most_tile_keys];
    const char* const row = bias + (query * c.bias_strides[2] + first * c.bias_strides[3]) * size;
    const int64_t n = (keys + word_keys - 1) / word_keys;
    for (int64_t i = 0; i < n; ++i) words[i] = ~0U;
    bias_adds<T> adds;
    close_by_row(whole_biases(c, row, keys, copy), keys, least_bias<T>, words, 1, adds);
    const bool some_add = adds.any();
    of.adds = of.adds || some_add;
    of.closes = of.closes || !some_add;
    for (int64_t i = 0; i < n; ++i) of.closes = of.closes || words[i] == 0;
  };
  open_rows(c, open, *task, look_at);
}

}  // namespace
}  // namespace manyhead::MH_ISA
