// Calls at odd moments of a process and of its threads: from destructors that run after the library's own, at exit, in
// forked children, from a host's parallel_for while a profile ends, while the instruction set changes.
#include <doctest/doctest.h>

#include <sys/types.h>
#include <atomic>
#include <chrono>
#include <functional>
#include <stop_token>
#include <thread>
#include <utility>

#include "calls.hpp"
#include "own_process.hpp"

using namespace manyhead;
using namespace manyhead::test;

namespace {

// Speaks when it is destroyed: after all that was made later.
struct last_words {
  std::function<void()> speak;
  ~last_words() {
    if (speak) speak();
  }
};
last_words of_process;  // made before the library is called
thread_local last_words of_thread;

constexpr char large[] = "f32 b2 h4 q64 kv256 d64";
constexpr char split_keys[] = "f32 b1 h2 q1 kv8192 d64";

// Calls of each kind, so many that threads of the library come to stand by for the next ones. It keeps what they gave
// at first; later that must be the same to the bit.
class calls {
 public:
  explicit calls(int times = 15) : times_(times) {
    outs_[0] = large_.result(with_threads(1));
    outs_[1] = split_.result(with_threads(1));
    layer_out_ = layer_.result(96, with_threads(1)).out;
  }
  void again() {
    for (int i = 0; i < times_; ++i) {
      for (const int32_t threads : {2, 0, 1}) {
        expect(same_bits(large_.result(with_threads(threads)), outs_[0]), "another result");
        expect(same_bits(split_.result(with_threads(threads)), outs_[1]), "another result where keys are split");
        expect(same_bits(layer_.result(96, with_threads(threads)).out, layer_out_), "another result of the layer");
      }
      expect(large_.run({}) == MH_INVALID_ARGUMENT && *mh_last_error() != 0, "a wrong call was not refused");
    }
  }

 private:
  const int times_;
  attention_call large_{large}, split_{split_keys};
  layer_call layer_{MH_DTYPE_F32, 96};
  std::vector<char> outs_[2], layer_out_;
};

// A host's pool of one thread, which does something else before the first tasks of a call.
struct host {
  std::function<void()> first;

  mh_exec exec(int32_t threads = 2) {
    mh_exec e = with_threads(threads);
    e.parallel_ctx = this;
    e.parallel_for = [](void* ctx, int64_t n, mh_task_fn fn, void* arg) {
      auto* self = static_cast<host*>(ctx);
      if (self->first) std::exchange(self->first, nullptr)();
      for (int64_t i = 0; i < n; ++i) fn(arg, i);
    };
    return e;
  }
};

void profile_once() {
  check(mh_profile_begin(nullptr));
  check(mh_profile_end());
}

}  // namespace

TEST_CASE("calls from the destructor of a thread's object that is older than the thread's first call") {
  for (const bool profiled : {false, true}) {
    for (const bool first : {false, true}) {  // the thread's first call of all is in the destructor
      CAPTURE(profiled);
      CAPTURE(first);
      const auto experiment = [&] {
        calls c;
        if (profiled) check(mh_profile_begin(nullptr));
        std::string said = "nothing was said";
        std::thread([&] {
          of_thread.speak = [&] { said = thrown([&] { c.again(); }); };
          if (!first) c.again();
        }).join();
        if (profiled) check(mh_profile_end());
        expect(said.empty(), said);
        c.again();
      };
      CHECK(in_child(experiment) == "");
    }
  }
}

TEST_CASE("calls at exit, before and after what the library registers there") {
  const auto experiment = [] {
    static calls* c = nullptr;
    static int said = 0;
    const auto speak = [] {
      const std::string wrong = thrown([] { c->again(); });
      if (!wrong.empty()) std::fprintf(stderr, "at exit: %s\n", wrong.c_str());
      if (!wrong.empty()) std::_Exit(2);
      ++said;
    };
    std::atexit(speak);
    of_thread.speak = speak;
    of_process.speak = [speak] {  // last of all
      speak();
      std::_Exit(said == 4 ? 0 : 3);
    };
    c = new calls(4);
    c->again();
    std::atexit(speak);
    std::exit(4);  // which is 0 where all four have spoken
  };
  CHECK(in_child(experiment) == "");
}

TEST_CASE("fork inside a host's parallel_for while a profile runs") {
  const auto experiment = [] {
    attention_call call(large);
    const std::vector<char> wanted = call.result(with_threads(1));
    check(mh_profile_begin(nullptr));
    pid_t child = -1;
    host pool{[&] {
      child = fork();
      if (child == 0) alarm(patience / 2);
    }};
    const bool same = same_bits(call.result(pool.exec()), wanted);
    if (child == 0) {
      const std::string said = thrown([&] {
        expect(same, "another result");
        for (int i = 0; i < 3; ++i) {
          check(mh_profile_begin(nullptr));
          expect(same_bits(call.result(pool.exec()), wanted), "another result in a profile");
          check(mh_profile_end());
        }
      });
      if (!said.empty()) std::fprintf(stderr, "in a forked child: %s\n", said.c_str());
      _exit(said.empty() ? 0 : 1);
    }
    const std::string end = end_of(child);
    expect(end.empty(), "the child " + end);
    expect(same, "another result");
    check(mh_profile_end());
  };
  CHECK(in_child(experiment) == "");
}

TEST_CASE("fork while another thread begins, ends and describes profiles") {
  const auto experiment = [] {
    attention_call call(large);
    const std::vector<char> wanted = call.result(with_threads(1));
    for (int i = 0; i < 12; ++i) expect(same_bits(call.result(), wanted), "another result");
    const std::jthread other([](const std::stop_token& stop) {
      attention_call other_call(large);
      while (!stop.stop_requested()) {
        mh_profile_begin(nullptr);
        for (int i = 0; i < 30; ++i) other_call.run(with_threads(1));
        mh_profile_end();
        size_t size = 0;
        for (int i = 0; i < 10; ++i) mh_profile_describe(MH_PROFILE_TRACE, nullptr, 0, &size);
      }
    });
    for (int i = 0; i < 10; ++i) {
      const auto later = [&] {
        profile_once();
        expect(same_bits(call.result(), wanted), "another result");
        profile_once();
      };
      const std::string end = in_child(later, patience / 2);
      expect(end.empty(), "child " + std::to_string(i) + " " + end);
      expect(same_bits(call.result(), wanted), "another result after a fork");
    }
  };
  CHECK(in_child(experiment) == "");
}

TEST_CASE("a child of a process that has used one thread has threads of its own, of one that has used two it has one") {
  for (const int32_t used : {1, 2}) {
    CAPTURE(used);
    const auto experiment = [&] {
      if (mh_threads() < 2) return;
      attention_call call(large);
      const std::vector<char> wanted = call.result(with_threads(used));
      const auto later = [&] {
        profile watching;
        expect(same_bits(call.result(), wanted), "another result");
        const char* const threads = used == 1 ? "\"threads\": 2" : "\"threads\": 1";
        const std::string seen = watching.end();
        expect(seen.find(threads) != seen.npos, std::string("not ") + threads + ": " + seen.substr(0, 600));
      };
      const std::string end = in_child(later, patience / 2);
      expect(end.empty(), "the child " + end);
    };
    CHECK(in_child(experiment) == "");
  }
}

TEST_CASE("profiles asked for inside a host's parallel_for while another thread ends one") {
  for (const bool begins : {false, true}) {
    CAPTURE(begins);
    const auto experiment = [&] {
      attention_call call(large);
      const std::vector<char> wanted = call.result(with_threads(1));
      check(mh_profile_begin(nullptr));
      std::thread ending;
      mh_status asked = MH_OK, ended = MH_INTERNAL_ERROR;
      host pool{[&] {
        ending = std::thread([&] { ended = mh_profile_end(); });
        std::this_thread::sleep_for(std::chrono::milliseconds(200));  // until it waits for this call
        size_t size = 0;
        asked = begins ? mh_profile_begin(nullptr) : mh_profile_describe(MH_PROFILE_SUMMARY, nullptr, 0, &size);
      }};
      const bool same = same_bits(call.result(pool.exec()), wanted);
      ending.join();
      expect(same, "another result");
      expect(asked == MH_INVALID_ARGUMENT, "asking was not refused");
      expect(ended == MH_OK, "the profile did not end");
      profile_once();
    };
    CHECK(in_child(experiment) == "");
  }
}

TEST_CASE("the instruction set changes while a thread makes calls: then they have the bits of the last one") {
  const auto experiment = [] {
    attention_call call("f32 b1 h1 q2 kv24 d16"), other("f32 b1 h1 q3 kv24 d16");
    std::vector<const char*> names;
    std::vector<std::vector<char>> wanted;
    for (int32_t i = 0; i < mh_isa_count(); ++i) {
      if (mh_isa_supported(i) == 0) continue;
      check(mh_set_isa(mh_isa_name(i)));
      const std::vector<char>& result = call.result(with_threads(1));
      if (!wanted.empty() && (wanted.size() == 2 || same_bits(wanted[0], result))) continue;
      names.push_back(mh_isa_name(i));
      wanted.push_back(result);
    }
    if (names.size() < 2) return;  // none to tell apart
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(700);
    for (size_t round = 0; std::chrono::steady_clock::now() < end; ++round) {
      const size_t last = round % 2;
      std::atomic<bool> begun = false, stop = false;
      std::thread changing([&] {
        do {
          mh_set_isa(names[1 - last]);
          begun.store(true);
          mh_set_isa(names[last]);
        } while (!stop.load());
      });
      while (!begun.load()) std::this_thread::yield();
      for (int i = 0; i < 10; ++i) {
        other.run(with_threads(1));
        call.run(with_threads(1));
      }
      stop.store(true);
      changing.join();
      expect(names[last] == std::string(mh_isa_current()), "another instruction set than was set last");
      expect(same_bits(call.result(with_threads(1)), wanted[last]),
             std::string("not the bits of ") + names[last] + " in round " + std::to_string(round));
    }
  };
  CHECK(in_child(experiment) == "");
}
