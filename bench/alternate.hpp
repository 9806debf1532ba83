// Times contestants in turn, so that what else happens on the machine meets all of them.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <vector>

namespace alternate {

inline double seconds_of(const std::function<void()>& run, int calls) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / calls;
}

// The fastest time of a call of each contestant. They take turns for `seconds` and at least five rounds; a turn is a
// call or, where that takes less than a millisecond, as many as fill it, so that threads have come to stand by for them.
inline std::vector<double> fastest(const std::vector<std::function<void()>>& contestants, double seconds) {
  constexpr double turn = 1e-3;
  std::vector<double> best(contestants.size(), std::numeric_limits<double>::infinity());
  std::vector<int> calls;
  for (const auto& run : contestants) {
    run();  // touches memory, wakes threads
    calls.push_back(static_cast<int>(std::clamp(turn / std::max(seconds_of(run, 1), 1e-8), 1.0, 1e5)));
  }
  const auto start = std::chrono::steady_clock::now();
  const auto spent = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  for (int round = 0; round < 5 || spent() < seconds; ++round)
    for (std::size_t i = 0; i < contestants.size(); ++i)
      best[i] = std::min(best[i], seconds_of(contestants[i], calls[i]));
  return best;
}

}  // namespace alternate
