// Attention as most programs write it first: two products of a BLAS and a softmax between them, head by head.
#pragma once

#include <cstdint>

namespace plain {

struct shape {
  int64_t batch, heads, q_len, kv_len, head_dim;
  bool causal;       // the last query attends all keys
  bool heads_inner;  // [batch, len, heads, head_dim], else [batch, heads, len, head_dim]
};

// Room for the scores of one head; on several threads of as many heads as there are threads.
int64_t scores_needed(const shape& s, int threads);

// f32. On several threads: heads in parallel, or where there are fewer heads than threads the products and rows of each.
void attention(const shape& s, const float* q, const float* k, const float* v, float* out, float* scores, int threads);

}  // namespace plain
