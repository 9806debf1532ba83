// See machine.hpp. Everything but the cap on threads is read once; what cannot be found out keeps its default there.
#include "machine.hpp"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <thread>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>
#endif

namespace manyhead {
namespace {

std::string first_line(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

#if defined(__x86_64__)
// AMX: Linux saves its registers only for processes that have asked for it.
bool may_use_tiles() {
  constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (amx_bf16 | amx_tile)) != (amx_bf16 | amx_tile)) return false;
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

// Zen 3 has the family of Zen 4, but no AVX-512. What comes after Zen 5 is taken for it, and any core of Intel's with AVX-512 for
// the one that was measured.
cpu_core find_core(bool has_avx512) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (has_avx512 && __builtin_cpu_is("intel")) return cpu_core::intel;
  if (!has_avx512 || !__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d)) return cpu_core::other;
  const unsigned family = (a >> 8 & 0xfu) + (a >> 20 & 0xffu);
  return family >= 0x1a ? cpu_core::zen5 : cpu_core::zen4;
}

// The builtin also asks the operating system (XGETBV) whether it saves the wide registers.
void find_levels(machine& m) {
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt") &&
                  __builtin_cpu_supports("popcnt");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
                  __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  m.has_level[static_cast<int>(cpu_level::x86_floor)] = true;
  m.has_level[static_cast<int>(cpu_level::x86_v3)] = v3;
  m.has_level[static_cast<int>(cpu_level::x86_v4)] = v4;
  const bool amx = v4 && may_use_tiles();
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool more = __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0;
  const bool bf16 = more && (a >> 5 & 1u) != 0, fp16 = more && (a >> 21 & 1u) != 0;
  m.has_level[static_cast<int>(cpu_level::x86_bf16)] = v4 && bf16;
  // VDPBF16PS: 1020 GFLOP/s on two cores of Zen 5, where FMA does 512; on a Xeon with AMX 120 on one, where FMA does 241.
  m.slow_level[static_cast<int>(cpu_level::x86_bf16)] = __builtin_cpu_is("intel");
  m.core = find_core(v4);
  m.has_level[static_cast<int>(cpu_level::x86_amx)] = amx;
  m.has_level[static_cast<int>(cpu_level::x86_amx_fp16)] = amx && fp16;
}

std::string find_name() {
  unsigned words[12] = {};
  for (unsigned i = 0; i < 3; ++i) {
    unsigned* w = words + size_t{4} * i;
    if (!__get_cpuid(0x80000002u + i, w, w + 1, w + 2, w + 3)) return "x86-64";
  }
  char text[sizeof words + 1] = {};
  std::memcpy(text, words, sizeof words);
  const std::string name(text + std::strspn(text, " "));
  return name.substr(0, name.find_last_not_of(' ') + 1);
}
#else
void find_levels(machine& m) {
#if defined(__aarch64__)
  m.has_level[static_cast<int>(cpu_level::arm_floor)] = true;  // Advanced SIMD belongs to the architecture
#if defined(__linux__)
  // BFMMLA and its kin, which only CPUs of Armv8.2 or later may have.
  constexpr unsigned long bf16 = 1ul << 14;
  m.has_level[static_cast<int>(cpu_level::arm_bf16)] = (getauxval(AT_HWCAP2) & bf16) != 0;
#endif
#else
  static_cast<void>(m);
#endif
}

std::string find_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != line.npos) return line.substr(colon + 2);
  }
#if defined(__aarch64__)
  return "AArch64";
#else
  return "unknown";
#endif
}
#endif

#if defined(__linux__)
// "48K", "2048K", "32M" -> bytes; 0 = unreadable.
int64_t parse_size(const std::string& text) {
  int64_t size = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), size).ptr;
  const char unit = end == text.data() + text.size() ? ' ' : *end;
  return unit == 'M' ? size << 20 : unit == 'K' ? size << 10 : size;
}

// What the kernel says of the first CPU, else the C library (which asks the CPU): a container may lack /sys, a virtual
// machine may show no caches.
void find_caches(machine& m) {
  struct {
    int64_t* bytes;
    char level;
    int name;
  } caches[] = {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
      {&m.l1_bytes, '1', _SC_LEVEL1_DCACHE_SIZE},
      {&m.l2_bytes, '2', _SC_LEVEL2_CACHE_SIZE},
      {&m.l3_bytes, '3', _SC_LEVEL3_CACHE_SIZE},
#else
      {&m.l1_bytes, '1', -1},
      {&m.l2_bytes, '2', -1},
      {&m.l3_bytes, '3', -1},
#endif
  };
  for (auto& cache : caches) {
    int64_t found = 0;
    for (int i = 0; i < 8 && found == 0; ++i) {
      const std::string dir = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/";
      const std::string level = first_line(dir + "level"), type = first_line(dir + "type");
      if (level == std::string(1, cache.level) && type != "Instruction") found = parse_size(first_line(dir + "size"));
    }
    if (found <= 0 && cache.name >= 0) found = sysconf(cache.name);
    if (found > 0) *cache.bytes = found;
  }
}

// CPU time that the control group of this process, or one above it, may use, in CPUs, rounded up; `most` where there is
// no limit. "max 100000" or "<quota> <period>" in cpu.max; files of the older version 1 are not read.
int32_t quota_cpus(int32_t most) {
  std::string group;
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("0::/")) group = line.substr(3);
  }
  for (;;) {
    const std::string limit = first_line("/sys/fs/cgroup" + group + "/cpu.max");
    int64_t quota = 0, period = 0;
    const char* end = limit.data() + limit.size();
    const auto parsed = std::from_chars(limit.data(), end, quota);
    if (parsed.ec == std::errc() && parsed.ptr != end) std::from_chars(parsed.ptr + 1, end, period);
    if (quota > 0 && period > 0) most = static_cast<int32_t>(std::min<int64_t>(most, (quota + period - 1) / period));
    if (group.empty()) return most;
    group.resize(group.rfind('/'));
  }
}

int32_t find_cpus() {
  // The call fails where the machine has more CPUs than there is room for.
  for (int room = 1024; room <= 1 << 20; room *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(room), [](cpu_set_t* s) { CPU_FREE(s); });
    if (set == nullptr) break;
    const size_t size = CPU_ALLOC_SIZE(room);
    if (sched_getaffinity(0, size, set.get()) == 0) return quota_cpus(std::max(CPU_COUNT_S(size, set.get()), 1));
  }
  return static_cast<int32_t>(std::max(std::thread::hardware_concurrency(), 1u));
}
// How many numbers a list such as "0,2-3" names.
int32_t listed(const std::string& list) {
  int32_t count = 0;
  std::istringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    int32_t first = 0, last = 0;
    const char* end = range.data() + range.size();
    const auto parsed = std::from_chars(range.data(), end, first);
    if (parsed.ec != std::errc()) continue;
    last = first;
    if (parsed.ptr != end && *parsed.ptr == '-') std::from_chars(parsed.ptr + 1, end, last);
    count += last - first + 1;
  }
  return count;
}

// Not those that might be plugged in, which glibc counts, nor those of this process, which musl does.
int32_t cpus_of_machine() {
  const int32_t present = listed(first_line("/sys/devices/system/cpu/present"));
  return present > 0 ? present : static_cast<int32_t>(sysconf(_SC_NPROCESSORS_CONF));
}

// Cores: sets of hardware threads that share one. Nodes of memory as the kernel counts them.
host find_host() {
  host m;
  std::set<std::string> cores;
  for (long cpu = 0; cpu < sysconf(_SC_NPROCESSORS_CONF); ++cpu) {
    const std::string dir = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    const std::string siblings = first_line(dir + "thread_siblings_list");
    if (!siblings.empty()) cores.insert(siblings);  // else it is switched off
  }
  m.cores = static_cast<int32_t>(cores.size());
  m.numa_nodes = listed(first_line("/sys/devices/system/node/has_memory"));
  const int64_t pages = sysconf(_SC_PHYS_PAGES);
  if (pages > 0) m.memory_bytes = pages * sysconf(_SC_PAGESIZE);
  utsname system{};
  if (uname(&system) == 0) m.system = std::string(system.sysname) + " " + system.release;
  return m;
}
#else
void find_caches(machine&) {}
host find_host() { return {}; }
int32_t find_cpus() { return static_cast<int32_t>(std::max(std::thread::hardware_concurrency(), 1u)); }
int32_t cpus_of_machine() { return find_cpus(); }
#endif

void complain(machine& m, const std::string& name, const std::string& value, const std::string& wanted) {
  if (m.environment_error.empty())
    m.environment_error = "the environment variable " + name + " is \"" + value + "\", must be " + wanted;
}

void read_flag(machine& m, const char* name, bool& flag) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == 0) return;
  flag = *text == '1';
  if ((*text != '0' && *text != '1') || text[1] != 0) complain(m, name, text, "0 or 1");
}

void read_environment(machine& m) {
  if (const char* isa = std::getenv("MH_ISA")) m.isa_request = isa;
  if (const char* path = std::getenv("MH_PROFILE")) m.profile_path = path;
  read_flag(m, "MH_VERBOSE", m.verbose);
  read_flag(m, "MH_F32_UNIT", m.f32_on_unit);
  read_flag(m, "MH_OPENMP", m.openmp);
  const char* threads = std::getenv("MH_THREADS");
  if (threads == nullptr || *threads == 0) return;
  const char* end = threads + std::strlen(threads);
  int32_t number = 0;
  const auto parsed = std::from_chars(threads, end, number);
  if (parsed.ec == std::errc() && parsed.ptr == end && number >= 0) {
    m.threads_request = number;
  } else {
    complain(m, "MH_THREADS", threads, "a whole number >= 0 (0 = no cap)");
  }
}

machine detect() {
  machine m;
  m.has_level[static_cast<int>(cpu_level::any)] = true;
  find_levels(m);
  m.cpu_name = find_name();
  find_caches(m);
  m.cpus = find_cpus();
  m.f32_on_unit = unit_pays_for_f32(cpus_of_machine());
  read_environment(m);
  return m;
}

std::atomic<int32_t> cap{-1};  // -1: never set, so MH_THREADS counts; 0: removed

}  // namespace

const machine& this_machine() {
  static const machine& m = *new machine(detect());  // never destroyed: threads may be at work when the process ends
  return m;
}

host this_host() { return find_host(); }

int32_t allowed_threads(int32_t asked) {
  const machine& m = this_machine();
  const int32_t set = cap.load(std::memory_order_relaxed);
  const int32_t most = set >= 0 ? set : m.threads_request;
  if (most > 0) return asked > 0 ? std::min(asked, most) : most;
  return asked > 0 ? asked : m.cpus;
}

int32_t max_threads() { return allowed_threads(0); }

void set_max_threads(int32_t threads) { cap.store(threads, std::memory_order_relaxed); }

}  // namespace manyhead
