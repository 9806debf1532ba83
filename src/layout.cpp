// See layout.hpp.
#include "layout.hpp"

namespace manyhead {

double pair_bytes(const problem& p, const int64_t* strides, int64_t size) {
  const int64_t n[] = {p.batch, p.heads, p.q_len, p.kv_len};
  double bytes = static_cast<double>(size);
  for (int i = 0; i < 4; ++i) bytes *= strides[i] == 0 ? 1.0 : static_cast<double>(n[i]);
  return bytes;
}

bool are_apart(int64_t bytes, int64_t stride, int64_t dim, int64_t size) {
  return stride * size % bytes == 0 && dim * size % bytes != 0;
}

bool are_side_by_side(const problem& p) {
  return p.kv_heads > 1 && p.k_strides[1] == p.head_dim && p.v_strides[1] == p.v_dim && p.k_strides[3] == 1 &&
         p.v_strides[3] == 1;
}

bool writes_side_by_side(const problem& p) {
  return p.kv_heads > 1 && p.out_strides[1] == p.v_dim && p.out_strides[3] == 1;
}

bool has_rows_in_order(const problem& p) { return p.k_strides[2] == p.head_dim && p.v_strides[2] == p.v_dim; }

bool has_heads_in_order(const problem& p) {
  return are_side_by_side(p) && p.k_strides[2] == p.kv_heads * p.head_dim && p.v_strides[2] == p.kv_heads * p.v_dim;
}

bool has_heads_in_order_with_gaps(const problem& p) {
  return are_side_by_side(p) && p.k_strides[2] >= p.kv_heads * p.head_dim && p.v_strides[2] >= p.kv_heads * p.v_dim;
}

std::optional<problem> joined(const problem& p) {
  constexpr uint32_t tells_apart =
      MH_INPUT_KEY_MASK | MH_INPUT_SEQUSED_K | MH_INPUT_Q_OFFSET | MH_INPUT_ALIBI | MH_INPUT_SINKS;
  if (p.batch <= 1 || p.has_input(tells_apart)) return {};
  problem one = p;
  one.batch = 1;
  one.heads = p.batch * p.heads;
  one.kv_heads = p.batch * p.kv_heads;
  // Entry after entry heads have to lie as far apart as in one. Strides of what is empty may be any, of what is not there are 0.
  const auto join = [](int64_t* strides, int64_t heads) {
    if (heads == 1) strides[1] = strides[0];
    int64_t next = 0;
    return heads == 1 || (!__builtin_mul_overflow(heads, strides[1], &next) && strides[0] == next);
  };
  for (int64_t* strides : {one.q_strides, one.out_strides, one.mask_strides, one.bias_strides, one.lse_strides}) {
    if (!join(strides, p.heads)) return {};
  }
  for (int64_t* strides : {one.k_strides, one.v_strides}) {
    if (!join(strides, p.kv_heads)) return {};
  }
  return one;
}

}  // namespace manyhead
