// A problem line made real: arrays with data and the strides that the line asks for, each between two inaccessible
// pages, so that a read or write past either end is a crash; what lies between elements holds NaN (inputs) or a canary
// (outputs).
//
// data=    normal    q, k, v ~ N(0, 1)
//          masked    normal, and masks, biases and lengths that empty whole rows
//          heavy     lognormal tails
//          poison    normal, and NaN and inf in some keys that some rows attend
//          nanbias   normal, and a bias of one key that is NaN, for few rows
//          padded    normal, and a bias that is the lowest finite number for the first half of the keys, for some rows for all
//          padnan    padded, and NaN in a value of the last key
//          blocks    normal, and masks and biases of 0 and -inf, for odd heads of 0 and the lowest number, that leave each five
//                    rows some keys in a row, or none; key masks leave out the first and the last keys
//          stairs    normal, and masks and biases of -inf that leave rows keys in a row, later ones to each; a third of the biases add
//          spread    scores that grow (or fall) along the keys to about +-60: the running maximum moves all the time
//          equal     all keys and values equal
//          huge      scores of +-1e6 and +-1e30, the largest well apart
//          maxval    v near the largest number
//          topval    v the largest number, and its negative
//          farsinks  normal, and sinks far from all scores: -1e30, 1e20, the lowest float (f64: -1e307), 1e12, in turn
//          denormal  v below the smallest normal number
//          opposed   q tiny and k huge, so that scores are as usual (not f16)
//          small     k denormal, around 2^-127, and q around 2^55: a scale of 2^69 makes scores of them (not f16)
//          large     scores of -2^128 and 0, which a scale of 2^-126 makes -4 and 0 (not f16)
// strides= packed (q, k, v as slices of one row), transposed (last two dimensions), zero (one stride of q, k, v each
//          is 0), negative (all but the last), reversed (the last), lastdim (the last is 3), qout (that of q and out
//          alone), odd (padded and off by one element)
// bcast=   dimensions of mask and bias whose stride is 0      slopes=bh  ALiBi slopes of each batch entry
// extra=   the last n keys are attended whatever masks say
//
// Whatever the data, keys that no row attends hold NaN and inf.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "problem_file.hpp"
#include "random_numbers.hpp"
#include "reference.hpp"

namespace manyhead::test {

// Bytes that end right before an inaccessible page, or begin right after one.
class guarded_memory {
 public:
  guarded_memory() = default;
  guarded_memory(size_t bytes, bool at_end, int fill) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = std::max<size_t>(1, (bytes + page - 1) / page) * page;
    void* pages = mmap(nullptr, size_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<unsigned char*>(pages) + page;
    if (mprotect(begin_, size_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    data = at_end ? begin_ + size_ - bytes : begin_;
    std::memset(begin_, fill, size_);
  }
  guarded_memory(guarded_memory&& from) noexcept { *this = std::move(from); }
  guarded_memory& operator=(guarded_memory&& from) noexcept {
    std::swap(begin_, from.begin_);
    std::swap(size_, from.size_);
    std::swap(data, from.data);
    return *this;
  }
  guarded_memory(const guarded_memory&) = delete;
  guarded_memory& operator=(const guarded_memory&) = delete;
  ~guarded_memory() {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    if (begin_ != nullptr) munmap(begin_ - page, size_ + 2 * page);
  }
  std::string_view bytes() const { return {reinterpret_cast<const char*>(begin_), size_}; }
  void fill(int byte) { std::memset(begin_, byte, size_); }
  bool holds_only(unsigned char byte) const {
    return *begin_ == byte && std::memcmp(begin_, begin_ + 1, size_ - 1) == 0;
  }

  unsigned char* data = nullptr;

 private:
  unsigned char* begin_ = nullptr;
  size_t size_ = 0;
};

// Element types beyond mh_dtype.
inline constexpr int32_t type_byte = 4, type_i32 = 5, type_i64 = 6;
inline constexpr int poison_byte = 0xff;  // NaN in every float type, "true" in a mask
inline constexpr int canary_byte = 0xfd;  // -4e37, -1e298; NaN in f16

using index4 = std::array<int64_t, 4>;

struct tensor {
  int32_t type = 0;
  index4 dims{0, 0, 0, 0};  // unused ones are 1
  index4 strides{0, 0, 0, 0};
  guarded_memory memory;
  unsigned char* base = nullptr;  // element [0, 0, 0, 0]; NULL = the case has no such array

  static size_t size_of(int32_t type) { return std::array<size_t, 7>{4, 8, 2, 2, 1, 4, 8}[static_cast<size_t>(type)]; }
  bool is_empty() const { return dims[0] * dims[1] * dims[2] * dims[3] == 0; }

  void allocate(bool at_end, bool one_off, int fill) {
    int64_t low = 0, high = is_empty() ? -1 : 0;
    for (size_t i = 0; i < 4 && !is_empty(); ++i) (strides[i] < 0 ? low : high) += (dims[i] - 1) * strides[i];
    const size_t size = size_of(type);
    memory = guarded_memory(static_cast<size_t>(high - low + 1 + one_off) * size, at_end, fill);
    base = memory.data + (static_cast<int64_t>(one_off && !at_end) - low) * static_cast<int64_t>(size);
  }
  unsigned char* place(const index4& i) const {
    return base + at(strides.data(), i[0], i[1], i[2], i[3]) * static_cast<int64_t>(size_of(type));
  }
  double get(const index4& i) const {
    if (type < type_byte) return element(place(i), type, 0);
    if (type == type_byte) return *place(i);
    return static_cast<double>(index_of(place(i), type - type_i32, 0));
  }
  void set(const index4& i, double value) {
    const auto put = [&](auto x) { std::memcpy(place(i), &x, sizeof x); };
    switch (type) {
      case MH_DTYPE_F32:
        return put(static_cast<float>(value));
      case MH_DTYPE_F64:
        return put(value);
      case MH_DTYPE_BF16:
        return put(bf16_bits(value));
      case MH_DTYPE_F16:
        return put(f16_bits(value));
      case type_byte:
        return put(static_cast<uint8_t>(value));
      case type_i32:
        return put(static_cast<int32_t>(value));
      default:
        return put(static_cast<int64_t>(value));
    }
  }
  // f(index) for every element, the last dimension fastest.
  template <class F>
  void each(F f) const {
    index4 i{};
    for (i[0] = 0; i[0] < dims[0]; ++i[0])
      for (i[1] = 0; i[1] < dims[1]; ++i[1])
        for (i[2] = 0; i[2] < dims[2]; ++i[2])
          for (i[3] = 0; i[3] < dims[3]; ++i[3]) f(i);
  }
  std::vector<double> values() const {
    std::vector<double> list;
    each([&](const index4& i) { list.push_back(get(i)); });
    return list;
  }
};

inline uint64_t hash_of(const std::string& text) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

// The strides of an array of `rank` dimensions under strides=<kind>.
inline index4 strides_of(const std::string& kind, int rank, const index4& dims) {
  index4 strides{};
  int64_t step = kind == "lastdim" ? 3 : 1;
  for (int i = rank - 1; i >= 0; --i) {
    const auto u = static_cast<size_t>(i);
    strides[u] = step;
    step *= std::max<int64_t>(1, dims[u]);
    if (kind == "odd") step += rank - i + 1;
  }
  const auto last = static_cast<size_t>(rank - 1);
  if (kind == "transposed" && rank >= 2) {
    strides[last] = std::max<int64_t>(1, dims[last - 1]);
    strides[last - 1] = 1;
  }
  for (size_t i = 0; i <= last; ++i)
    if ((kind == "negative" && i != last) || (kind == "reversed" && i == last)) strides[i] = -strides[i];
  return strides;
}

struct test_case {
  problem_line line;
  problem p;
  mh_tensors t{};
  tensor q, k, v, out, mask, bias, key_mask, lens, offsets, slopes, sinks, lse, weights, mean_weights, column_sums,
      scores;

  // Without data there are p and the tensors' shapes only.
  explicit test_case(const problem_line& from, bool with_data = true) : line(from), random_(hash_of(from.text)) {
    describe_arrays();
    if (!with_data) return;
    allocate();
    fill();
    remember_inputs();
  }

  std::array<tensor*, 10> inputs() { return {&q, &k, &v, &mask, &bias, &key_mask, &lens, &offsets, &slopes, &sinks}; }
  std::array<tensor*, 6> outputs() { return {&out, &lse, &weights, &mean_weights, &column_sums, &scores}; }

  // To be called after inputs have been changed on purpose.
  void remember_inputs() {
    for (size_t i = 0; i < inputs_.size(); ++i) inputs_[i] = inputs()[i]->memory.bytes();
  }
  void clear_outputs() {
    for (tensor* x : outputs())
      if (x->base != nullptr) x->memory.fill(canary_byte);
  }
  // All bytes of all outputs, canaries included.
  std::string output_bytes() {
    std::string all;
    for (tensor* x : outputs())
      if (x->base != nullptr) all += x->memory.bytes();
    return all;
  }
  // What a run has written besides its outputs; "" = nothing. Destroys the outputs.
  std::string damage() {
    std::string found;
    const char* const names[] = {
        "q",     "k",   "v",   "mask",    "bias",         "key_mask",    "seqused_k", "q_offset", "alibi_slopes",
        "sinks", "out", "lse", "weights", "mean_weights", "column_sums", "scores"};
    for (size_t i = 0; i < inputs_.size(); ++i)
      if (inputs()[i]->memory.bytes() != inputs_[i]) found += std::string(" changed ") + names[i];
    for (size_t i = 0; i < outputs().size(); ++i) {
      tensor& x = *outputs()[i];
      if (x.base == nullptr) continue;
      x.each([&](const index4& at) { std::memset(x.place(at), canary_byte, tensor::size_of(x.type)); });
      if (!x.memory.holds_only(canary_byte)) found += std::string(" wrote outside ") + names[i + inputs_.size()];
    }
    return found;
  }

 private:
  random_numbers random_;
  std::array<std::string, 10> inputs_;  // all their bytes

  struct array {
    tensor* to;
    int32_t type;
    int rank;
    index4 dims;
    int64_t* strides;
  };

  // The arrays whose strides `m` holds.
  std::array<array, 12> arrays(mh_problem& m) {
    const int64_t kv_heads = m.kv_heads ? m.kv_heads : m.heads;
    const int64_t v_dim = m.v_dim ? m.v_dim : m.head_dim;
    const int64_t masked_keys = m.kv_len - line.extra_keys;
    const int32_t real = m.dtype == MH_DTYPE_F64 ? MH_DTYPE_F64 : MH_DTYPE_F32;
    return {{{&q, m.dtype, 4, {m.batch, m.heads, m.q_len, m.head_dim}, m.q_strides},
             {&k, m.dtype, 4, {m.batch, kv_heads, m.kv_len, m.head_dim}, m.k_strides},
             {&v, m.dtype, 4, {m.batch, kv_heads, m.kv_len, v_dim}, m.v_strides},
             {&out, m.dtype, 4, {m.batch, m.heads, m.q_len, v_dim}, m.out_strides},
             {&mask, type_byte, 4, {m.batch, m.heads, m.q_len, masked_keys}, m.mask_strides},
             {&bias, m.bias_dtype, 4, {m.batch, m.heads, m.q_len, masked_keys}, m.bias_strides},
             {&key_mask, type_byte, 2, {m.batch, masked_keys, 1, 1}, m.key_mask_strides},
             {&lse, real, 3, {m.batch, m.heads, m.q_len, 1}, m.lse_strides},
             {&weights, real, 4, {m.batch, m.heads, m.q_len, m.kv_len}, m.weights_strides},
             {&mean_weights, real, 3, {m.batch, m.q_len, m.kv_len, 1}, m.mean_weights_strides},
             {&column_sums, real, 3, {m.batch, m.heads, m.kv_len, 1}, m.column_sums_strides},
             {&scores, real, 4, {m.batch, m.heads, m.q_len, m.kv_len}, m.scores_strides}}};
  }

  // Explicit strides where the line asks for unusual ones; elsewhere zeros, which validate() completes.
  void choose_strides(mh_problem& m) {
    if (line.strides.empty() && line.broadcast.empty() && line.extra_keys == 0) return;
    m.flags |= MH_FLAG_STRIDES;
    for (const array& x : arrays(m)) {
      if (x.strides[x.rank - 1] != 0) continue;  // bshd
      const bool apart = line.strides == "qout" && (x.to == &q || x.to == &out);
      std::copy_n(strides_of(apart ? "lastdim" : line.strides, x.rank, x.dims).data(), x.rank, x.strides);
      if (x.to == &mask || x.to == &bias)
        for (const char c : line.broadcast) x.strides[std::string("bhqk").find(c)] = 0;
    }
    if (line.strides == "zero") m.q_strides[0] = m.k_strides[1] = m.v_strides[3] = 0;
    if (line.strides == "packed") {
      const auto list = arrays(m);
      int64_t row = 0;  // q, k and v of one token
      for (size_t i = 0; i < 3; ++i) row += list[i].dims[1] * list[i].dims[3];
      for (size_t i = 0; i < 3; ++i) {
        const int64_t packed[4] = {row * list[i].dims[2], list[i].dims[3], row, 1};
        std::copy_n(packed, 4, list[i].strides);
      }
    }
  }

  void describe_arrays() {
    mh_problem& m = line.problem;
    choose_strides(m);
    p = validate(m, line.extra_keys);
    for (const array& x : arrays(p)) {
      x.to->type = x.type;
      x.to->dims = x.dims;
      std::copy_n(x.strides, x.rank, x.to->strides.data());
    }
    const auto vector = [](tensor& x, int32_t type, int64_t rows, int64_t n) {
      x.type = type;
      x.dims = {rows, n, 1, 1};
      x.strides = {n, 1, 0, 0};
    };
    const int32_t real = lse.type;
    vector(lens, type_i32 + p.index_type, 1, p.batch);
    vector(offsets, type_i32 + p.index_type, 1, p.batch);
    vector(slopes, real, p.alibi_batch_stride != 0 ? p.batch : 1, p.heads);
    vector(sinks, real, 1, p.heads);
  }

  template <class Pointer>
  void allocate(tensor& x, bool wanted, int fill_byte, Pointer*& pointer) {
    if (!wanted) return;
    const uint64_t choice = random_.next();
    x.allocate((choice & 3) != 0, line.strides == "odd", fill_byte);
    pointer = reinterpret_cast<Pointer*>(x.base);
  }

  void allocate() {
    t.struct_size = sizeof t;
    allocate(q, true, poison_byte, t.q);
    allocate(k, true, poison_byte, t.k);
    allocate(v, true, poison_byte, t.v);
    allocate(mask, p.has_input(MH_INPUT_MASK), poison_byte, t.mask);
    allocate(bias, p.has_input(MH_INPUT_BIAS), poison_byte, t.bias);
    allocate(key_mask, p.has_input(MH_INPUT_KEY_MASK), poison_byte, t.key_mask);
    allocate(lens, p.has_input(MH_INPUT_SEQUSED_K), poison_byte, t.seqused_k);
    allocate(offsets, p.has_input(MH_INPUT_Q_OFFSET), poison_byte, t.q_offset);
    allocate(slopes, p.has_input(MH_INPUT_ALIBI), poison_byte, t.alibi_slopes);
    allocate(sinks, p.has_input(MH_INPUT_SINKS), poison_byte, t.sinks);
    allocate(out, true, canary_byte, t.out);
    allocate(lse, p.has_output(MH_OUTPUT_LSE), canary_byte, t.lse);
    allocate(weights, p.has_output(MH_OUTPUT_WEIGHTS), canary_byte, t.weights);
    allocate(mean_weights, p.has_output(MH_OUTPUT_MEAN_WEIGHTS), canary_byte, t.mean_weights);
    allocate(column_sums, p.has_output(MH_OUTPUT_COLUMN_SUMS), canary_byte, t.column_sums);
    allocate(scores, p.has_output(MH_OUTPUT_SCORES), canary_byte, t.scores);
  }

  // f(index, a number from N(0, 1)) -> value, for each element.
  template <class F>
  void fill(tensor& x, F f) {
    if (x.base == nullptr) return;
    x.each([&](const index4& i) { x.set(i, f(i, random_.normal())); });
  }

  void fill() {
    fill_masks();
    fill_qkv();
    hide_keys();
    if (line.data == "poison") poison_keys();
    if (line.data == "nanbias") poison_biases();
    if (line.data == "padnan")
      each_key([&](int64_t b, int64_t g, int64_t j, int64_t) {
        if (j + 1 == p.kv_len) v.set({b, g, j, 0}, std::nan(""));
      });
  }

  void fill_masks() {
    const bool empties = line.data == "masked";
    const double lowest = bias.type == MH_DTYPE_F16 ? -60000 : -1e30;  // f32 and f64 both lose any score beside -1e30
    const bool blocks = line.data == "blocks";
    const auto in_block = [](const index4& i, int64_t keys) {
      const int64_t some = i[2] / 5 + 3 * i[1], begin = some * 89 % keys;
      return some % 4 != 3 && i[3] >= begin && i[3] <= begin + some * 31 % (keys / 2 + 1);
    };
    const bool stairs = line.data == "stairs";
    const auto on_stairs = [](const index4& i, int64_t keys) {
      return i[3] >= 2 * i[2] - keys / 2 && i[3] < keys / 3 + 4 * i[2];
    };
    fill(mask, [&](const index4& i, double) -> double {
      if (stairs) return on_stairs(i, mask.dims[3]) ? 1 : 0;
      if (blocks) return in_block(i, mask.dims[3]) ? 1 : 0;
      if (empties && i[2] % 3 == 0) return 0;
      if (empties && i[2] % 5 == 1 && i[3] < mask.dims[3] / 2) return 0;
      const double yes[] = {1, 2, 255};
      return random_.below(10) < 3 ? 0 : yes[random_.below(3)];
    });
    fill(bias, [&](const index4& i, double normal) -> double {
      if (stairs && on_stairs(i, bias.dims[3])) return i[2] / 16 % 3 == 1 ? normal : 0;
      if (stairs) return -HUGE_VAL;
      if (blocks && in_block(i, bias.dims[3])) return 0;
      if (blocks) return i[1] % 2 ? -largest_of(bias.type) : -HUGE_VAL;
      if (line.data == "padded" || line.data == "padnan")
        return i[2] % 4 == 3 || i[3] < bias.dims[3] / 2 ? -largest_of(bias.type) : normal;
      if (empties && i[2] % 3 == 1) return -HUGE_VAL;
      if (empties && i[2] % 4 == 2) return lowest;
      return random_.below(10) == 0 ? -HUGE_VAL : 2 * normal;
    });
    fill(key_mask, [&](const index4& i, double) -> double {
      if (blocks) return i[1] >= key_mask.dims[1] / 5 + 9 * i[0] && i[1] < key_mask.dims[1] * 5 / 6 ? 1 : 0;
      return (empties && i[0] == 0) || random_.below(4) == 0 ? 0 : static_cast<double>(1 + random_.below(255));
    });
    const int64_t keys = p.kv_len - p.extra_keys;
    fill(lens, [&](const index4& i, double) {
      const int64_t first[] = {empties ? 0 : keys - keys / 3, keys, keys / 2, std::min<int64_t>(keys, 1)};
      return static_cast<double>(i[1] < 4 ? first[i[1]] : random_.below(keys + 1));
    });
    fill(offsets, [&](const index4& i, double) {
      const int64_t first[] = {empties ? -p.q_len : keys / 3, -2, keys - p.q_len};
      return static_cast<double>(i[1] < 3 ? first[i[1]] : random_.below(keys + p.q_len + 1) - p.q_len);
    });
    fill(slopes, [&](const index4& i, double) {
      return std::exp2(-8.0 * static_cast<double>(i[1] + 1) / static_cast<double>(p.heads)) *
             static_cast<double>(i[0] + 1);
    });
    fill(sinks, [&](const index4& i, double normal) {
      const double far[] = {-1e30, 1e20, sinks.type == MH_DTYPE_F64 ? -1e307 : -largest_of(MH_DTYPE_F32), 1e12};
      if (line.data == "farsinks") return far[i[1] % 4];
      return empties && i[1] == 0 ? -HUGE_VAL : 2 * normal;
    });
  }

  void fill_qkv() {
    const std::string_view kind = line.data;
    const bool is_f16 = p.dtype == MH_DTYPE_F16, is_f64 = p.is_f64();
    const double largest = is_f16 ? 65504 : is_f64 ? 1.79e308 : 3.38e38;
    const double below_normal = is_f16 ? 1e-5 : is_f64 ? 1e-309 : 3e-39;
    const auto sign = [](int64_t d) { return d * 5 % 3 == 1 ? -1.0 : 1.0; };
    const auto heavy = [&](double normal) { return normal * std::exp(random_.normal()); };
    fill(q, [&](const index4& i, double normal) {
      if (kind == "heavy") return heavy(normal);
      // Key j is m_j times a vector of signs, with m_j a permutation of 1.. kv_len; q is the same signs, some 0. So the
      // scores of a row are multiples of different m_j: one clear maximum, whatever the rounding.
      if (kind == "huge") {
        const bool some = i[3] == 0 || random_.below(2) == 0;
        return some ? sign(i[3]) * (i[2] % 2 ? -1 : 1) * std::ldexp(1, !is_f16 && i[1] % 2 ? 80 : 10) : 0;
      }
      if (kind == "opposed") return std::ldexp(normal, -115);
      if (kind == "small") return std::ldexp(normal, 55);
      if (kind == "large") return 1.0;
      if (kind == "tinyk") return std::ldexp(normal, is_f16 ? 13 : 125);
      if (kind == "tinyq") return std::ldexp(normal, is_f16 ? -15 : -127);
      return kind == "spread" ? 2 * normal : normal;
    });
    fill(k, [&](const index4& i, double normal) {
      if (kind == "heavy") return heavy(normal);
      if (kind == "huge") return sign(i[3]) * static_cast<double>(i[2] * 37 % p.kv_len + 1) * 8;
      if (kind == "equal") return static_cast<double>(i[3] % 5 - 2) / 4;
      if (kind == "opposed") return std::ldexp(normal, 115);
      if (kind == "small") return std::ldexp(normal, -127);
      if (kind == "large") return i[2] % 3 == 0 ? -std::ldexp(1, 128) / static_cast<double>(p.head_dim) : 0.0;
      if (kind == "tinyk") return std::ldexp(normal, is_f16 ? -15 : -127);  // denormal but in f64, beside a huge Q
      if (kind == "tinyq") return std::ldexp(normal, is_f16 ? 13 : 125);
      const double along = static_cast<double>(i[1] % 2 ? p.kv_len - 1 - i[2] : i[2]) / static_cast<double>(p.kv_len);
      return kind == "spread" ? normal * (1 + 8 * along) : normal;
    });
    fill(v, [&](const index4& i, double normal) {
      if (kind == "equal") return 0.1 * static_cast<double>(i[3] % 7 + 1);
      if (kind == "maxval") return (i[3] % 2 ? -largest : largest) * (0.5 + 0.5 * random_.uniform());
      if (kind == "topval") return i[3] % 2 ? -largest_of(p.dtype) : largest_of(p.dtype);
      return kind == "denormal" ? normal * below_normal : normal;
    });
  }

  // f(batch, kv_head, key, number of rows that attend it).
  template <class F>
  void each_key(F f) {
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t g = 0; g < p.kv_heads; ++g)
        for (int64_t j = 0; j < p.kv_len; ++j) {
          int64_t rows = 0;
          for (int64_t r = 0; r < p.rows(); ++r)
            rows += attends(p, t, b, g * p.group() + r % p.group(), r / p.group(), j);
          f(b, g, j, rows);
        }
  }

  // NaN and inf where no row looks.
  void hide_keys() {
    if (line.strides == "zero") return;  // other keys share the memory
    each_key([&](int64_t b, int64_t g, int64_t j, int64_t rows) {
      if (rows > 0) return;
      for (int64_t d = 0; d < p.head_dim; ++d) k.set({b, g, j, d}, (j + d) % 4 ? std::nan("") : HUGE_VAL);
      for (int64_t d = 0; d < p.v_dim; ++d) v.set({b, g, j, d}, (j + d) % 2 ? std::nan("") : HUGE_VAL);
    });
  }

  // NaN and inf where some rows look, if masks leave such keys; NaN in biases where another mask hides the slot.
  void poison_keys() {
    each_key([&](int64_t b, int64_t g, int64_t j, int64_t rows) {
      if (rows == p.rows()) return;
      if (j % 5 == 1) v.set({b, g, j, j % std::max<int64_t>(1, p.v_dim / 2)}, j % 2 ? std::nan("") : HUGE_VAL);
      if (j == 7 || j == p.kv_len / 6) k.set({b, g, j, j % p.head_dim}, std::nan(""));  // each takes whole rows
    });
    if (bias.base == nullptr || !line.broadcast.empty()) return;
    problem others = p;
    others.inputs &= ~MH_INPUT_BIAS;
    bias.each([&](const index4& i) {
      if (!attends(others, t, i[0], i[1], i[2], i[3])) bias.set(i, std::nan(""));
    });
  }

  // So few that nothing else in their panels is NaN; with all bits of a NaN, which must not carry into a number.
  void poison_biases() {
    bias.each([&](const index4& i) {
      if (i[2] % 50 == 7 && i[3] == i[2] % 3 * p.kv_len / 3)
        std::memset(bias.place(i), 0xff, tensor::size_of(bias.type));
    });
  }
};

}  // namespace manyhead::test
