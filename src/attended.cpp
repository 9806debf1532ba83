// See attended.hpp.
#include "attended.hpp"

#include <algorithm>

#include "blocks.hpp"

namespace manyhead {

key_range attended_keys(const problem& p, int64_t i) {
  const int64_t keys = p.kv_len - p.extra_keys;
  if (p.has_input(MH_INPUT_Q_OFFSET)) return {0, keys};
  const key_range r = reach_of(p, i + offset_of(p.align, keys, p.q_len, p.q_offset));
  const int64_t begin = std::clamp<int64_t>(r.begin, 0, keys);
  return {begin, std::max(begin, std::min(keys, r.end))};
}

int64_t most_keys_between(const problem& p) {
  const bool ends = p.causal || p.window_right >= 0;
  if (p.extra_keys > 0 || p.window_left < 0 || !ends) return p.kv_len;
  int64_t keys = std::min(p.window_left, p.kv_len);
  if (!p.causal) keys += std::min(p.window_right, p.kv_len);
  return std::min(p.kv_len, keys + p.q_len);
}

bool has_even_rows(const problem& p) { return !p.causal && !p.has_window(); }

double attended_pairs(const problem& p) {
  if (has_even_rows(p)) return static_cast<double>(p.q_len) * static_cast<double>(p.kv_len);
  double pairs = 0;
  // Ranges change linearly between few corners; long queries are sampled evenly.
  const int64_t step = std::max<int64_t>(1, p.q_len / 65536);
  for (int64_t i = 0; i < p.q_len; i += step) {
    const auto [begin, end] = attended_keys(p, i);
    pairs += static_cast<double>((end - begin + p.extra_keys) * std::min(step, p.q_len - i));
  }
  return pairs;
}

// Of the tiles of a panel's rows and block_kv keys; of very many panels one stands for its neighbours.
double share_skipped(const problem& p, int64_t panel_rows, int64_t block_kv) {
  const int64_t group = p.group(), rows = group * p.q_len;
  const int64_t tiles = blocks(p.kv_len, block_kv);
  if (tiles == 0 || p.q_len == 0) return 0;
  double used = 0;
  int64_t panels = 0;
  const int64_t step = panel_rows * (1 + rows / (panel_rows * 65536));
  for (int64_t row = 0; row < rows; row += step, ++panels) {
    const int64_t first = row / group;
    const int64_t last = (std::min(row + panel_rows, rows) - 1) / group;
    const int64_t begin = attended_keys(p, first).begin;
    const int64_t end = p.extra_keys > 0 ? p.kv_len : attended_keys(p, last).end;
    const int64_t skipped = begin / block_kv;
    if (begin < end) used += static_cast<double>(blocks(end, block_kv) - skipped);
  }
  return 1.0 - used / (static_cast<double>(tiles) * static_cast<double>(panels));
}

}  // namespace manyhead
