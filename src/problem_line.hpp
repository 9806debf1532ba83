// Problems as lines of text: what mh_plan_describe prints before ": ", MH_VERBOSE logs, and mh_problem_parse reads.
//
//   <dtype> b<batch> h<heads>[/<kv_heads>] q<q_len> kv<kv_len> d<head_dim> [v<v_dim>]     dtype: f32 f64 bf16 f16
//   [causal] [align=tl|br|off:<n>] [window=<left>,<right>] [softcap=<x>] [scale=<x>] [alibi|alibi=signed] [slopes=bh]
//   [sinks] [mask] [bias|bias=<dtype>] [keymask] [lens] [offsets] [i64]     i64: lens and offsets are int64, else int32
//   [fastexp] [lse|lse2] [weights] [meanw] [colsums] [scores=raw|capped|biased]
//   [extra=<n>] n of the keys are a layer's own, attended whatever masks say: read as ordinary ones
//   [bshd]      q, k, v and out lie as [batch, len, heads, dim]
//   [strided]   they lie in some other way, which a line cannot say: read as contiguous
#pragma once

#include <string_view>

#include "error.hpp"
#include "problem.hpp"

namespace manyhead {

struct problem_text {
  char text[512];
};
problem_text to_text(const problem& p) noexcept;

// A line that is no problem: the sentence, and where the word at fault begins.
class line_error : public error {
 public:
  line_error(const std::string& text, size_t column) : error(MH_INVALID_ARGUMENT, text), column_(column) {}
  size_t column() const noexcept { return column_; }

 private:
  size_t column_;
};

// The problem as a caller fills it in; whether it makes sense is for validate() to say. Throws line_error.
mh_problem parse_problem(std::string_view line);

}  // namespace manyhead
