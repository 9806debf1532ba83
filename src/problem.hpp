// What to compute, as plain data. A `problem` is an mh_problem whose defaults are filled in and whose every field has
// been checked; nothing below validate() and check_tensors() looks at an argument again.
#pragma once

#include "check.hpp"
#include "manyhead/manyhead.h"

namespace manyhead {

// All strides explicit, kv_heads and v_dim set, scale resolved, align never MH_ALIGN_UNSET, window bounds -1 where
// there is no window, flags only those that still say something.
struct problem : mh_problem {
  // The last extra_keys of the kv_len keys are attended by every row, whatever masks, lengths and positions say; masks,
  // biases and seqused_k describe the others. Used by the multi-head layer's bias_k and add_zero_attn; 0 for C callers.
  int64_t extra_keys = 0;

  // Where the bytes of each tensor lie that the problem has and that is not empty, outputs first: from its first element, the
  // lowest one and the end of the highest one.
  struct extent {
    int64_t begin, end;
    int32_t place;    // among the pointers of mh_tensors
    int32_t element;  // bytes
  } extents[16] = {};
  int32_t extent_count = 0, output_count = 0;

  bool is_f64() const noexcept { return dtype == MH_DTYPE_F64; }
  bool has_input(uint32_t bit) const noexcept { return (inputs & bit) != 0; }
  bool has_output(uint32_t bit) const noexcept { return (outputs & bit) != 0; }
  bool has_window() const noexcept { return window_left >= 0 || window_right >= 0; }
  int64_t group() const noexcept { return heads / kv_heads; }  // query heads that share a kv head
  int64_t rows() const noexcept { return group() * q_len; }    // of a kv head
};

// The only checks of a problem: struct_size, enums, flag bits, ranges, divisibility, overflow of every shape and of
// shape x stride x element size, outputs that overlap themselves. Throws manyhead::error naming the field. extra_keys
// as above.
problem validate(const mh_problem& user, int64_t extra_keys = 0);

double default_scale(int64_t head_dim) noexcept;  // 1 / sqrt(head_dim)

// The only checks of a call's pointers: present exactly where the problem names them, aligned to their element
// (outputs, q, k, v and index arrays), contents of seqused_k (0..kv_len), q_offset (|.| < 2^62), no output overlapping
// an input or another output. Returns the tensors with a struct_size of this build (missing tail fields NULL).
mh_tensors check_tensors(const problem& p, const mh_tensors& user);

// The caller's workspace, where there is one, overlaps none of the tensors, which have passed check_tensors.
void check_workspace(const problem& p, const mh_tensors& tensors, const mh_exec& exec);

// The same of other arrays of a call: one that is written, from all tensors; one that is read, from the outputs.
void check_apart_from_all(const array& written, const problem& p, const mh_tensors& tensors);
void check_apart_from_outputs(const array& read, const problem& p, const mh_tensors& tensors);

}  // namespace manyhead
