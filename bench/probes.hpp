// What this machine can do at this moment: the rate of multiply-adds in registers and the rate of reading memory.
// Shared machines change from minute to minute, so the benchmarks ask again beside each row.
#pragma once

#include <cstddef>
#include <string_view>

namespace probes {

// The widest instruction set that the probes know and this CPU has; names as in mh_isa_name.
std::string_view best_isa();

// f32 FLOP/s of a loop of independent multiply-adds on that many threads, measured for `seconds`. A name that the
// probes do not know or the CPU lacks gives 0. "sse2" has no fused multiply-add: there it is a multiplication and an
// addition.
double fma_rate(std::string_view isa, int threads, double seconds);

// Bytes/s of reading a buffer of that size over and over, a part of it on each thread, measured for `seconds`.
double read_rate(std::size_t bytes, int threads, double seconds);

// Memory aligned to 64 bytes, in huge pages where the system has them, as NumPy's large arrays are.
class buffer {
 public:
  explicit buffer(std::size_t bytes);
  ~buffer();
  buffer(const buffer&) = delete;
  buffer& operator=(const buffer&) = delete;
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  std::byte* data_;
};

}  // namespace probes
