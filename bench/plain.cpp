// See plain.hpp. Compiled for this very CPU and with fast mathematics, so that the compiler makes the loops of the
// softmax, exponentials included, vectors: the composition is to be as good as plain code gets.
#include "plain.hpp"

#include <cblas.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <cmath>

namespace plain {
namespace {

// In place; keys from `seen` on get weight 0.
void softmax(float* row, int64_t seen, int64_t keys) {
  float top = -3e38F, sum = 0;
  for (int64_t j = 0; j < seen; ++j) top = row[j] > top ? row[j] : top;
  for (int64_t j = 0; j < seen; ++j) sum += row[j] = std::exp(row[j] - top);
  const float share = seen > 0 ? 1 / sum : 0;
  for (int64_t j = 0; j < seen; ++j) row[j] *= share;
  for (int64_t j = seen; j < keys; ++j) row[j] = 0;
}

struct one_head {
  const float *q, *k, *v;
  float* out;
  int row;  // elements from one row of q, k, v, out to the next
};

one_head head_of(const shape& s, int64_t index, const float* q, const float* k, const float* v, float* out) {
  const int64_t b = index / s.heads, h = index % s.heads, dim = s.head_dim;
  const auto at = [&](int64_t len) { return (b * len * s.heads + h * (s.heads_inner ? 1 : len)) * dim; };
  return {q + at(s.q_len), k + at(s.kv_len), v + at(s.kv_len), out + at(s.q_len),
          static_cast<int>(s.heads_inner ? s.heads * dim : dim)};
}

template <class Rows>
void attend(const shape& s, const one_head& x, float* scores, const Rows& for_rows) {
  const int rows = static_cast<int>(s.q_len), keys = static_cast<int>(s.kv_len), dim = static_cast<int>(s.head_dim);
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, keys, dim, scale, x.q, x.row, x.k, x.row, 0, scores, keys);
  for_rows([&](int64_t i) {
    const int64_t seen = s.causal ? std::clamp<int64_t>(i + s.kv_len - s.q_len + 1, 0, s.kv_len) : s.kv_len;
    softmax(scores + i * s.kv_len, seen, s.kv_len);
  });
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, dim, keys, 1, scores, keys, x.v, x.row, 0, x.out, x.row);
}

}  // namespace

int64_t scores_needed(const shape& s, int threads) {
  return s.q_len * s.kv_len * (s.batch * s.heads < threads ? 1 : threads);
}

void attention(const shape& s, const float* q, const float* k, const float* v, float* out, float* scores, int threads) {
  const int64_t heads = s.batch * s.heads;
  const bool by_heads = heads >= threads;
  openblas_set_num_threads(by_heads ? 1 : threads);
  const auto serial = [&](const auto& row) {
    for (int64_t i = 0; i < s.q_len; ++i) row(i);
  };
  const auto parallel = [&](const auto& row) { tbb::parallel_for(int64_t{0}, s.q_len, row); };
  if (by_heads && threads > 1) {
    tbb::parallel_for(int64_t{0}, heads, [&](int64_t i) {
      const int64_t slot = tbb::this_task_arena::current_thread_index();
      attend(s, head_of(s, i, q, k, v, out), scores + slot * s.q_len * s.kv_len, serial);
    });
    return;
  }
  for (int64_t i = 0; i < heads; ++i) {
    const one_head x = head_of(s, i, q, k, v, out);
    if (threads == 1) {
      attend(s, x, scores, serial);
    } else {
      attend(s, x, scores, parallel);
    }
  }
}

}  // namespace plain
