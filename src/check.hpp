// What argument checks are made of: sentences thrown as manyhead::error, structs of other versions of the header, and
// facts about strided arrays. Nothing here allocates unless it throws.
#pragma once

#include <charconv>
#include <concepts>
#include <cstring>
#include <initializer_list>
#include <string>

#include "error.hpp"

namespace manyhead {

inline void append(std::string& text, const char* part) { text += part; }
inline void append(std::string& text, const std::string& part) { text += part; }
template <typename T>
concept number = std::integral<T> || std::floating_point<T>;

// The shortest form that reads back the same, whatever the locale.
struct number_text {
  char digits[32];
  explicit number_text(number auto value) noexcept {
    *std::to_chars(digits, digits + sizeof digits - 1, value).ptr = 0;
  }
  // Of so many digits.
  number_text(double value, int precision) noexcept {
    *std::to_chars(digits, digits + sizeof digits - 1, value, std::chars_format::general, precision).ptr = 0;
  }
};
inline void append(std::string& text, number auto value) { text += number_text(value).digits; }

// invalid("kv_heads is ", 3, ", must divide heads = ", 8): says which argument, what it was, what was expected.
template <typename... Parts>
[[noreturn]] void fail(mh_status status, const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  throw error(status, text);
}
template <typename... Parts>
[[noreturn]] void invalid(const Parts&... parts) {
  fail(MH_INVALID_ARGUMENT, parts...);
}

// NULL and 0 where dtype is not an mh_dtype.
const char* dtype_name(int32_t dtype) noexcept;
int64_t dtype_size(int32_t dtype) noexcept;
inline int64_t real_size(int32_t dtype) noexcept { return dtype == MH_DTYPE_F64 ? 8 : 4; }

void check_enum(const char* name, int32_t value, int32_t last,
                const char* type);  // type: of the header, of values 0..last
void check_dtype(const char* name, int32_t value);
void check_bool(const char* name, int32_t value);
void check_bits(const char* name, uint32_t value, uint32_t known);
void check_zero(const char* name, int32_t value);
void check_at_least(const char* name, int64_t value, int64_t least);

// A public struct as this build knows it. A shorter one (older header) has zeros, the defaults, for what it lacks; it
// must hold at least `least` bytes. What a longer one (newer header) has on top must be zero, else it asks for
// something unknown here: MH_UNSUPPORTED.
void read_bytes(void* to, size_t size, size_t least, const void* from, const char* name);
template <typename Struct>
bool is_of_this_version(const Struct* user) noexcept {  // as nearly all are
  size_t given = 0;
  if (user != nullptr) std::memcpy(&given, user, sizeof given);
  return given == sizeof *user;
}
template <typename Struct>
Struct read_struct(const Struct* user, size_t least, const char* name) {
  Struct mine;
  if (is_of_this_version(user)) {
    std::memcpy(&mine, user, sizeof mine);
  } else {
    read_bytes(&mine, sizeof mine, least, user, name);
    mine.struct_size = sizeof mine;
  }
  return mine;
}

// An array in the caller's memory.
struct array {
  const char* name;
  const void* data;  // NULL where it is not known yet
  int rank;
  int64_t element;  // bytes of one
  int64_t dims[5];
  int64_t strides[5];  // in elements
};

// With strides that say nothing completed (see complete_strides), and all of it checked.
array checked_array(const char* name, const void* data, int64_t element, std::initializer_list<int64_t> dims,
                    const int64_t* strides, bool taken);

bool is_empty(const array& a) noexcept;
bool is_same(const array& a, const array& b) noexcept;  // in memory, shape and strides

// Bytes from the first named element (all indices 0) to the lowest and to the highest one. False on overflow.
bool reach(const array& a, int64_t& lowest, int64_t& highest) noexcept;

// Whether a contiguous array of these dims, zeros counted as ones, has less than 2^62 bytes.
bool fits(const array& a) noexcept;
void check_shape(const array& a);  // fails where it does not
// Replaces strides that say nothing by contiguous ones: all of them where all are zero and not `taken` as they are (see
// MH_FLAG_STRIDES), and those of dimensions with at most one element.
void complete_strides(array& a, bool taken);
// Fails where first and last element in memory lie further than 2^62 bytes apart.
void check_strides(const array& a);
// Fails where two elements may share memory. Every transposed or stepped view of an ordinary array passes.
void check_distinct(const array& a);
// Fails where a non-empty array is NULL, not aligned to its element, or leaves the address space.
void check_pointer(const array& a);
// Whether any byte belongs to both arrays, which passed the checks above. Exact, but for layouts so entangled that a
// bounded search finds no answer: then true. Views of one packed buffer, and interleaved ones, are not such.
bool share_memory(const array& a, const array& b) noexcept;

// Fails where they share memory. `written` is an output or a workspace.
void check_apart(const array& written, const array& other);

}  // namespace manyhead
