// See problem_line.hpp.
#include "problem_line.hpp"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "check.hpp"

namespace manyhead {
namespace {

// Appends to a fixed buffer; what does not fit is cut off.
class line {
 public:
  explicit line(std::span<char> buffer) noexcept : at_(buffer.data()), end_(buffer.data() + buffer.size() - 1) {
    *at_ = 0;
  }
  line& operator<<(const char* text) noexcept {
    while (*text != 0 && at_ != end_) *at_++ = *text++;
    *at_ = 0;
    return *this;
  }
  line& operator<<(number auto value) noexcept { return *this << number_text(value).digits; }

 private:
  char* at_;
  char* end_;
};

// Strides of [batch, length, heads, dim], or of [batch, heads, length, dim], without gaps.
bool has_layout(bool bshd, const int64_t* s, int64_t heads, int64_t length, int64_t dim, int64_t batch) noexcept {
  const int64_t head = bshd ? dim : length * dim, row = bshd ? heads * dim : dim;
  if (batch * heads * length * dim == 0) return true;
  return (batch <= 1 || s[0] == heads * length * dim) && (heads <= 1 || s[1] == head) && (length <= 1 || s[2] == row) &&
         (dim <= 1 || s[3] == 1);
}

bool has_layout(bool bshd, const problem& p) noexcept {
  return has_layout(bshd, p.q_strides, p.heads, p.q_len, p.head_dim, p.batch) &&
         has_layout(bshd, p.k_strides, p.kv_heads, p.kv_len, p.head_dim, p.batch) &&
         has_layout(bshd, p.v_strides, p.kv_heads, p.kv_len, p.v_dim, p.batch) &&
         has_layout(bshd, p.out_strides, p.heads, p.q_len, p.v_dim, p.batch);
}

// The words that stand for a bit.
struct bit_word {
  const char* word;
  uint32_t input, output;
};
constexpr bit_word bit_words[] = {{"alibi", MH_INPUT_ALIBI, 0},         {"sinks", MH_INPUT_SINKS, 0},
                                  {"mask", MH_INPUT_MASK, 0},           {"bias", MH_INPUT_BIAS, 0},
                                  {"keymask", MH_INPUT_KEY_MASK, 0},    {"lens", MH_INPUT_SEQUSED_K, 0},
                                  {"offsets", MH_INPUT_Q_OFFSET, 0},    {"lse", 0, MH_OUTPUT_LSE},
                                  {"lse2", 0, MH_OUTPUT_LSE},           {"weights", 0, MH_OUTPUT_WEIGHTS},
                                  {"meanw", 0, MH_OUTPUT_MEAN_WEIGHTS}, {"colsums", 0, MH_OUTPUT_COLUMN_SUMS}};
constexpr const char* stages[] = {"raw", "capped", "biased"};

struct dimension {
  const char* prefix;
  int64_t mh_problem::* field;
  bool needed;
};
constexpr dimension dimensions[] = {{"b", &mh_problem::batch, true},    {"h", &mh_problem::heads, true},
                                    {"q", &mh_problem::q_len, true},    {"kv", &mh_problem::kv_len, true},
                                    {"d", &mh_problem::head_dim, true}, {"v", &mh_problem::v_dim, false}};

template <class Number>
bool read_number(std::string_view text, Number& value) {
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  return failed == std::errc() && end == text.data() + text.size();
}

int32_t find_dtype(std::string_view word) {
  for (int32_t i = 0; dtype_name(i) != nullptr; ++i)
    if (word == dtype_name(i)) return i;
  return -1;
}

void set_bshd(int64_t (&strides)[4], int64_t length, int64_t heads, int64_t dim) {
  // Unsigned: whether the numbers make sense is not known yet.
  const auto l = static_cast<uint64_t>(length), h = static_cast<uint64_t>(heads), d = static_cast<uint64_t>(dim);
  const uint64_t bshd[4] = {l * h * d, d, h * d, 1};
  std::transform(bshd, bshd + 4, strides, [](uint64_t stride) { return static_cast<int64_t>(stride); });
}

// Reads one line, word by word.
class reader {
 public:
  explicit reader(std::string_view line) : line_(line), word_(line.substr(0, 0)) { p_.struct_size = sizeof p_; }

  mh_problem read() {
    if (!next()) refuse("the line is empty, must begin with a dtype: f32, f64, bf16 or f16");
    p_.dtype = find_dtype(word_);
    if (p_.dtype < 0) refuse_word("is not a dtype: f32, f64, bf16 or f16");
    while (next()) read_word();
    word_ = line_.substr(line_.size());
    for (const dimension& d : dimensions) {
      if (d.needed && !has(d.prefix)) refuse(std::string(d.prefix) + "<number> is missing");
    }
    if (has("offsets")) {
      if (has("align")) refuse("offsets and align=... exclude each other");
      p_.align = MH_ALIGN_OFFSET;
    }
    if (has("slopes") && !has("alibi")) refuse("slopes=bh is there, but alibi is not");
    if (has("i64") && !has("lens") && !has("offsets")) refuse("i64 is there, but neither lens nor offsets is");
    if (has("bshd")) lay_out();
    if (has("slopes")) p_.alibi_batch_stride = p_.heads;
    return p_;
  }

 private:
  bool next() {
    constexpr std::string_view blanks = " \t\r\n";
    const size_t begin = line_.find_first_not_of(blanks, at_);
    if (begin == line_.npos) return false;
    at_ = std::min(line_.find_first_of(blanks, begin), line_.size());
    word_ = line_.substr(begin, at_ - begin);
    return true;
  }

  [[noreturn]] void refuse(const std::string& why) const {
    const auto column = static_cast<size_t>(word_.data() - line_.data());
    throw line_error(why + " (column " + std::to_string(column + 1) + ")", column);
  }
  [[noreturn]] void refuse_word(const std::string& why) const { refuse("\"" + std::string(word_) + "\" " + why); }

  void read_word() {
    const size_t equals = word_.find('=');
    if (equals != word_.npos) {
      if (!read_option(word_.substr(0, equals), word_.substr(equals + 1))) refuse_word("is not a word of a problem");
    } else if (!read_flag() && !read_dimension()) {
      refuse_word("is not a word of a problem");
    }
  }

  bool read_dimension() {
    const size_t digits = word_.find_first_of("0123456789-");
    if (digits == word_.npos) return false;
    for (const dimension& d : dimensions) {
      if (word_.substr(0, digits) != d.prefix) continue;
      take_once(d.prefix);
      std::string_view number = word_.substr(digits);
      const size_t slash = number.find('/');
      if (d.field == &mh_problem::heads && slash != number.npos) {
        if (!read_number(number.substr(slash + 1), p_.kv_heads) || p_.kv_heads == 0)
          refuse_word("must be h<number>/<number>, the second at least 1");
        number = number.substr(0, slash);
      }
      if (!read_number(number, p_.*d.field)) refuse_word("must be " + std::string(d.prefix) + "<number>");
      if (d.field == &mh_problem::v_dim && p_.v_dim == 0) refuse_word("must be at least v1");  // 0 means head_dim
      return true;
    }
    return false;
  }

  bool read_flag() {
    for (const bit_word& flag : bit_words) {
      if (word_ != flag.word) continue;
      p_.inputs |= flag.input;
      p_.outputs |= flag.output;
      if (word_ == "lse2") p_.lse_base = MH_LSE_BASE2;
      take_once(word_ == "lse2" ? "lse" : word_);
      return true;
    }
    for (const std::string_view word : {"causal", "i64", "fastexp", "bshd", "strided"}) {
      if (word_ != word) continue;
      take_once(word);
      if (word == "causal") p_.causal = 1;
      if (word == "i64") p_.index_type = MH_INDEX_I64;
      if (word == "fastexp") p_.flags |= MH_FLAG_FAST_EXP;
      return true;
    }
    return false;
  }

  bool has(std::string_view kind) const { return std::find(seen_.begin(), seen_.end(), kind) != seen_.end(); }
  void take_once(std::string_view kind) {
    if (has(kind)) refuse_word("is the second of its kind");
    seen_.push_back(kind);
  }

  void number_of(std::string_view value, auto& number) const {
    if (!read_number(value, number)) refuse_word("does not end with a number");
  }

  bool read_option(std::string_view name, std::string_view value) {
    if (name == "align") {
      read_align(value);
    } else if (name == "window") {
      const size_t comma = value.find(',');
      p_.flags |= MH_FLAG_WINDOW;
      if (comma == value.npos || !read_number(value.substr(0, comma), p_.window_left) ||
          !read_number(value.substr(comma + 1), p_.window_right))
        refuse_word("must be window=<number>,<number>");
    } else if (name == "softcap") {
      number_of(value, p_.softcap);
    } else if (name == "scale") {
      p_.flags |= MH_FLAG_SCALE;
      number_of(value, p_.scale);
    } else if (name == "alibi") {
      p_.inputs |= MH_INPUT_ALIBI;
      p_.alibi_mode = MH_ALIBI_SIGNED;
      if (value != "signed") refuse_word("must be alibi or alibi=signed");
    } else if (name == "slopes") {
      if (value != "bh") refuse_word("must be slopes=bh");
    } else if (name == "bias") {
      p_.inputs |= MH_INPUT_BIAS;
      p_.bias_dtype = find_dtype(value);
      if (p_.bias_dtype < 0) refuse_word("does not end with a dtype: f32, f64, bf16 or f16");
    } else if (name == "scores") {
      p_.outputs |= MH_OUTPUT_SCORES;
      const auto* const stage = std::find(std::begin(stages), std::end(stages), value);
      if (stage == std::end(stages)) refuse_word("must be scores=raw, scores=capped or scores=biased");
      p_.scores_stage = static_cast<int32_t>(stage - stages);
    } else if (name == "extra") {
      int64_t keys = 0;
      number_of(value, keys);
      if (keys < 0) refuse_word("must be at least extra=0");
    } else {
      return false;
    }
    take_once(name);
    return true;
  }

  void read_align(std::string_view value) {
    if (value.starts_with("off:")) {
      p_.align = MH_ALIGN_OFFSET;
      return number_of(value.substr(4), p_.q_offset);
    }
    p_.align = value == "tl" ? MH_ALIGN_TOP_LEFT : MH_ALIGN_BOTTOM_RIGHT;
    if (value != "tl" && value != "br") refuse_word("must be align=tl, align=br or align=off:<number>");
  }

  void lay_out() {
    const int64_t kv_heads = p_.kv_heads != 0 ? p_.kv_heads : p_.heads;
    const int64_t v_dim = p_.v_dim != 0 ? p_.v_dim : p_.head_dim;
    set_bshd(p_.q_strides, p_.q_len, p_.heads, p_.head_dim);
    set_bshd(p_.k_strides, p_.kv_len, kv_heads, p_.head_dim);
    set_bshd(p_.v_strides, p_.kv_len, kv_heads, v_dim);
    set_bshd(p_.out_strides, p_.q_len, p_.heads, v_dim);
  }

  std::string_view line_, word_;
  size_t at_ = 0;
  mh_problem p_{};
  std::vector<std::string_view> seen_;  // words, without what they say
};

}  // namespace

problem_text to_text(const problem& p) noexcept {
  problem_text result;
  line text(result.text);
  text << dtype_name(p.dtype) << " b" << p.batch << " h" << p.heads;
  if (p.kv_heads != p.heads) text << "/" << p.kv_heads;
  text << " q" << p.q_len << " kv" << p.kv_len << " d" << p.head_dim;
  if (p.v_dim != p.head_dim) text << " v" << p.v_dim;
  if (p.causal) text << " causal";
  const bool positions = p.causal || p.has_window() || p.has_input(MH_INPUT_ALIBI);
  if (p.align == MH_ALIGN_TOP_LEFT && positions && p.q_len != p.kv_len - p.extra_keys) text << " align=tl";
  if (p.align == MH_ALIGN_BOTTOM_RIGHT) text << " align=br";
  if (p.align == MH_ALIGN_OFFSET && !p.has_input(MH_INPUT_Q_OFFSET)) text << " align=off:" << p.q_offset;
  if (p.has_window()) text << " window=" << p.window_left << "," << p.window_right;
  if (p.softcap != 0) text << " softcap=" << p.softcap;
  if (p.scale != default_scale(p.head_dim)) text << " scale=" << p.scale;
  if (p.has_input(MH_INPUT_ALIBI)) text << (p.alibi_mode == MH_ALIBI_SIGNED ? " alibi=signed" : " alibi");
  if (p.alibi_batch_stride != 0) text << " slopes=bh";
  if (p.has_input(MH_INPUT_SINKS)) text << " sinks";
  if (p.has_input(MH_INPUT_MASK)) text << " mask";
  if (p.has_input(MH_INPUT_BIAS)) text << " bias";
  if (p.has_input(MH_INPUT_BIAS) && p.bias_dtype != MH_DTYPE_F32) text << "=" << dtype_name(p.bias_dtype);
  if (p.has_input(MH_INPUT_KEY_MASK)) text << " keymask";
  if (p.has_input(MH_INPUT_SEQUSED_K)) text << " lens";
  if (p.has_input(MH_INPUT_Q_OFFSET)) text << " offsets";
  const bool indices = p.has_input(MH_INPUT_SEQUSED_K) || p.has_input(MH_INPUT_Q_OFFSET);
  if (indices && p.index_type == MH_INDEX_I64) text << " i64";
  if (p.extra_keys != 0) text << " extra=" << p.extra_keys;
  if ((p.flags & MH_FLAG_FAST_EXP) != 0) text << " fastexp";
  if (p.has_output(MH_OUTPUT_LSE)) text << (p.lse_base == MH_LSE_BASE2 ? " lse2" : " lse");
  if (p.has_output(MH_OUTPUT_WEIGHTS)) text << " weights";
  if (p.has_output(MH_OUTPUT_MEAN_WEIGHTS)) text << " meanw";
  if (p.has_output(MH_OUTPUT_COLUMN_SUMS)) text << " colsums";
  if (p.has_output(MH_OUTPUT_SCORES)) text << " scores=" << stages[p.scores_stage];
  if (!has_layout(false, p)) text << (has_layout(true, p) ? " bshd" : " strided");
  return result;
}

mh_problem parse_problem(std::string_view line) { return reader(line).read(); }

}  // namespace manyhead
