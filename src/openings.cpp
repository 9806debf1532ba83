// See openings.hpp.
#include "openings.hpp"

#include <initializer_list>

#include "blocks.hpp"

namespace manyhead {
namespace {

// A look pays where heads have so many keys between them for each row of what is looked at. Zen 5, one thread: 2 heads of 64 keys
// and rows 0.92 with a mask, 8 heads 0.97, of 128 keys 1.03; with a bias 0.92, 1.04 and 1.09. Rows that queries share cost next to
// nothing.
constexpr int64_t keys_for_mask = 1024, keys_for_bias = 384;

int64_t rows_of(const kernel_call& c, const openings& open) { return open.query_words == 0 ? 1 : c.q_len; }
int64_t block_bytes(const kernel_call& c, const openings& open) {
  const int64_t of_entry = blocks(rows_of(c, open), opening_queries);
  return bytes_of(entries_of(c, open), bytes_of(of_entry, sizeof(opening)));
}

// 0 where there are none.
int64_t bytes_of_openings(const kernel_call& c, const openings& open) {
  if (open.row_words == 0) return 0;
  const int64_t words = bytes_of(entries_of(c, open), bytes_of(rows_of(c, open), open.row_words));
  return round_up(block_bytes(c, open) + bytes_of(words, sizeof(uint32_t)), 64);
}

// Of an array with such strides, or none. They take no more memory than Q, K, V and results: a mask may be strides alone.
openings openings_of(const problem& p, const int64_t* strides, int64_t least_keys) {
  const bool queries_share = p.q_len == 1 || strides[2] == 0;
  const bool shared = p.heads > 1 && strides[1] == 0 && p.kv_len - p.extra_keys > word_keys;
  if (!shared || (!queries_share && p.kv_len < blocks(least_keys, p.heads))) return {};
  openings open{};
  open.row_words = blocks(p.kv_len, word_keys) + 1;
  const int64_t rows = queries_share ? 1 : p.q_len, words = bytes_of(rows, open.row_words);
  const auto product = [](int64_t a, int64_t b) { return static_cast<double>(a) * static_cast<double>(b); };
  const double vectors = product(p.q_len, p.heads) + product(p.kv_len, p.kv_heads);
  const double arrays = vectors * product(dtype_size(p.dtype), p.head_dim + p.v_dim);
  if (product(words, sizeof(uint32_t)) > arrays) return {};
  if (!queries_share) open.query_words = open.row_words;
  if (strides[0] == 0) return open;
  open.batch_words = words;
  open.batch_blocks = blocks(rows, opening_queries);
  return open;
}

}  // namespace

int64_t entries_of(const kernel_call& c, const openings& open) { return open.batch_blocks == 0 ? 1 : c.batch; }

int64_t choose_openings(plan& plan) {
  const problem& p = plan.p;
  if (plan.kernel == route_decode) return 0;  // it has few rows to read a mask for
  kernel_call& c = plan.call;
  if (p.has_input(MH_INPUT_MASK)) c.mask_open = openings_of(p, p.mask_strides, keys_for_mask);
  if (p.has_input(MH_INPUT_BIAS)) c.bias_open = openings_of(p, p.bias_strides, keys_for_bias);
  const int64_t of_keys[] = {p.key_mask_strides[0], 0, 0, p.key_mask_strides[1]};
  if (p.has_input(MH_INPUT_KEY_MASK)) c.key_mask_open = openings_of(p, of_keys, 0);
  int64_t bytes = 0;
  for (const openings* const open : {&c.mask_open, &c.bias_open, &c.key_mask_open})
    bytes += bytes_of_openings(c, *open);
  return bytes;
}

void place_openings(kernel_call& c, char* memory) {
  for (openings* const open : {&c.mask_open, &c.bias_open, &c.key_mask_open}) {
    if (open->row_words == 0) continue;
    open->blocks = reinterpret_cast<opening*>(memory);
    open->words = reinterpret_cast<uint32_t*>(memory + block_bytes(c, *open));
    memory += bytes_of_openings(c, *open);
  }
}

}  // namespace manyhead
