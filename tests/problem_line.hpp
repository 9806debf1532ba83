// Reads a problem from a line of text: tests/problems.txt, what mh_plan_describe prints before ": ", a bug report.
//
//   <dtype> b<batch> h<heads>[/<kv_heads>] q<q_len> kv<kv_len> d<head_dim> [v<v_dim>]     dtype: f32 f64 bf16 f16
//   [causal] [align=tl|br|off:<n>] [window=<left>,<right>] [softcap=<x>] [scale=<x>] [alibi|alibi=signed] [sinks]
//   [mask] [bias|bias=<dtype>] [keymask] [lens] [offsets] [i64]     i64: lens and offsets are int64, else int32
//   [lse|lse2] [weights] [meanw] [colsums] [scores=raw|capped|biased]
//   [bshd]      q, k, v and out lie as [batch, len, heads, dim]
//   [strided]   they lie in some other way, which a line cannot say: read as contiguous
//
// Words that only tests use (test_case.hpp says what they do):
//   [extra=<n>] [data=<kind>] [strides=<kind>] [bcast=<some of b h q k>] [slopes=bh]
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "manyhead/manyhead.h"

namespace manyhead::test {

struct problem_line {
  std::string text;
  mh_problem problem{};  // as a caller fills it in
  int64_t extra_keys = 0;
  std::string data = "normal";
  std::string strides;
  std::string broadcast;
  bool slopes_per_batch = false;
};

template <class Number>
bool read_number(std::string_view text, Number& value) {
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  return failed == std::errc() && end == text.data() + text.size();
}

// The place of a word in a list, -1 when it is not there.
template <size_t N>
int32_t find_word(std::string_view word, const char* const (&list)[N]) {
  for (size_t i = 0; i < N; ++i)
    if (word == list[i]) return static_cast<int32_t>(i);
  return -1;
}

inline int32_t find_dtype(std::string_view word) { return find_word(word, {"f32", "f64", "bf16", "f16"}); }

inline bool read_dimension(std::string_view word, mh_problem& p) {
  const auto number = [&](std::string_view prefix, int64_t& value) {
    return word.starts_with(prefix) && read_number(word.substr(prefix.size()), value);
  };
  if (word.starts_with('h') && word.find('/') != word.npos) {
    const size_t slash = word.find('/');
    return read_number(word.substr(1, slash - 1), p.heads) && read_number(word.substr(slash + 1), p.kv_heads);
  }
  return number("b", p.batch) || number("h", p.heads) || number("q", p.q_len) || number("kv", p.kv_len) ||
         number("d", p.head_dim) || number("v", p.v_dim);
}

inline bool read_align(std::string_view value, mh_problem& p) {
  if (value.starts_with("off:")) {
    p.align = MH_ALIGN_OFFSET;
    return read_number(value.substr(4), p.q_offset);
  }
  p.align = find_word(value, {"", "tl", "br"});
  return p.align > 0;
}

inline bool read_option(std::string_view name, std::string_view value, problem_line& line) {
  mh_problem& p = line.problem;
  if (name == "align") return read_align(value, p);
  if (name == "window") {
    p.flags |= MH_FLAG_WINDOW;
    const size_t comma = value.find(',');
    return comma != value.npos && read_number(value.substr(0, comma), p.window_left) &&
           read_number(value.substr(comma + 1), p.window_right);
  }
  if (name == "softcap") return read_number(value, p.softcap);
  if (name == "scale") {
    p.flags |= MH_FLAG_SCALE;
    return read_number(value, p.scale);
  }
  if (name == "alibi") {
    p.inputs |= MH_INPUT_ALIBI;
    p.alibi_mode = MH_ALIBI_SIGNED;
    return value == "signed";
  }
  if (name == "bias") {
    p.inputs |= MH_INPUT_BIAS;
    p.bias_dtype = find_dtype(value);
    return p.bias_dtype >= 0;
  }
  if (name == "scores") {
    p.outputs |= MH_OUTPUT_SCORES;
    p.scores_stage = find_word(value, {"raw", "capped", "biased"});
    return p.scores_stage >= 0;
  }
  if (name == "extra") return read_number(value, line.extra_keys);
  if (name == "data") {
    line.data = value;
    return find_word(value, {"normal", "heavy", "equal", "huge", "maxval", "denormal", "masked", "poison", "spread"}) >=
           0;
  }
  if (name == "strides") {
    line.strides = value;
    return find_word(value, {"packed", "transposed", "zero", "negative", "reversed", "lastdim", "odd"}) >= 0;
  }
  if (name == "bcast") {
    line.broadcast = value;
    return value.find_first_not_of("bhqk") == value.npos && !value.empty();
  }
  if (name == "slopes") {
    line.slopes_per_batch = true;
    return value == "bh";
  }
  return false;
}

inline bool read_flag(std::string_view word, mh_problem& p) {
  const struct {
    const char* word;
    uint32_t input, output;
  } flags[] = {{"alibi", MH_INPUT_ALIBI, 0},         {"sinks", MH_INPUT_SINKS, 0},
               {"mask", MH_INPUT_MASK, 0},           {"bias", MH_INPUT_BIAS, 0},
               {"keymask", MH_INPUT_KEY_MASK, 0},    {"lens", MH_INPUT_SEQUSED_K, 0},
               {"offsets", MH_INPUT_Q_OFFSET, 0},    {"lse", 0, MH_OUTPUT_LSE},
               {"lse2", 0, MH_OUTPUT_LSE},           {"weights", 0, MH_OUTPUT_WEIGHTS},
               {"meanw", 0, MH_OUTPUT_MEAN_WEIGHTS}, {"colsums", 0, MH_OUTPUT_COLUMN_SUMS}};
  for (const auto& flag : flags) {
    if (word != flag.word) continue;
    p.inputs |= flag.input;
    p.outputs |= flag.output;
    if (word == "lse2") p.lse_base = MH_LSE_BASE2;
    if (word == "offsets") p.align = MH_ALIGN_OFFSET;
    return true;
  }
  if (word == "causal") p.causal = 1;
  if (word == "i64") p.index_type = MH_INDEX_I64;
  return word == "causal" || word == "i64" || word == "bshd" || word == "strided";
}

inline void set_bshd(int64_t (&strides)[4], int64_t len, int64_t heads, int64_t dim) {
  const int64_t bshd[4] = {len * heads * dim, dim, heads * dim, 1};
  for (int i = 0; i < 4; ++i) strides[i] = bshd[i];
}

// Throws std::invalid_argument naming the word that it does not know.
inline problem_line parse_problem(const std::string& text) {
  problem_line line;
  line.text = text;
  mh_problem& p = line.problem;
  p.struct_size = sizeof p;
  std::istringstream words(text);
  std::vector<std::string> list{std::istream_iterator<std::string>(words), {}};
  const auto refuse = [&](const std::string& why) { throw std::invalid_argument(why + " in \"" + text + "\""); };
  if (list.empty() || find_dtype(list[0]) < 0) refuse("no dtype");
  p.dtype = find_dtype(list[0]);
  p.batch = p.q_len = p.kv_len = -1;
  bool bshd = false;
  for (size_t i = 1; i < list.size(); ++i) {
    const std::string& word = list[i];
    const size_t equals = word.find('=');
    const bool known = equals == word.npos ? read_dimension(word, p) || read_flag(word, p)
                                           : read_option(word.substr(0, equals), word.substr(equals + 1), line);
    if (!known) refuse("unknown word " + word);
    bshd = bshd || word == "bshd";
  }
  if (p.batch < 0 || p.heads == 0 || p.q_len < 0 || p.kv_len < 0 || p.head_dim == 0)
    refuse("b, h, q, kv or d is missing");
  if (bshd) {
    const int64_t kv_heads = p.kv_heads ? p.kv_heads : p.heads;
    const int64_t v_dim = p.v_dim ? p.v_dim : p.head_dim;
    set_bshd(p.q_strides, p.q_len, p.heads, p.head_dim);
    set_bshd(p.k_strides, p.kv_len, kv_heads, p.head_dim);
    set_bshd(p.v_strides, p.kv_len, kv_heads, v_dim);
    set_bshd(p.out_strides, p.q_len, p.heads, v_dim);
  }
  return line;
}

// The problems of a file; empty lines and what follows '#' are not looked at.
inline std::vector<problem_line> read_problems(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::invalid_argument("cannot read " + path);
  std::vector<problem_line> lines;
  for (std::string text; std::getline(file, text);) {
    text.erase(std::min(text.find('#'), text.size()));
    text.erase(text.find_last_not_of(" \t\r") + 1);
    if (!text.empty()) lines.push_back(parse_problem(text));
  }
  return lines;
}

}  // namespace manyhead::test
