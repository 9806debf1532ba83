// Which tasks the first pass of a plan is cut into for a number of workers, and the order in which they are taken. Only
// this depends on the number of workers, and no bit of a result depends on this: a row block of the plan is cut at the
// borders of its panels alone, so that every panel holds the same rows whatever the cut.
#pragma once

#include <vector>

#include "plan.hpp"

namespace manyhead {

class schedule {
 public:
  schedule(const plan& plan, int64_t workers);

  int64_t tasks() const { return heads_ * head_tasks_; }
  bool in_shares() const { return in_shares_; }  // whether each worker has a share of its own (deal.hpp)
  kernel_task at(int64_t index) const;           // the task that is taken as number index, without scratch

  // The share of the busiest worker over the mean, where each worker takes the next task when it has done its last one
  // and time is cost, shares or not. 1 = perfect. Lengths in memory are not known: as if full.
  double balance() const;

  // Costs of the tasks in the order in which they are taken: the (row, key) pairs that their panels compute, whole
  // vectors of rows, plus what a row costs whatever its keys; one and a half times as much for each of the plan's
  // last_rows. The unit is a pair.
  std::vector<double> costs() const;

 private:
  struct place {
    int64_t head, position;  // of a batch entry and kv heads; of the task among their own, longest first
  };
  place place_of(int64_t index) const;
  void put_rows(int64_t position, kernel_task& t) const;
  void put_heads(int64_t head, kernel_task& t) const;
  double cost_of(int64_t position) const;  // for one kv head
  bool is_level(int64_t tasks) const;

  const plan& plan_;
  int64_t workers_;
  int64_t together_;         // kv heads of a task, but for the last of a batch entry
  int64_t entry_heads_;      // of a batch entry, so many together counting as one
  int64_t heads_;            // of all batch entries
  int64_t piece_rows_;       // rows of a task, but for the last of a block
  int64_t block_pieces_;     // tasks of a whole row block and chunk
  int64_t last_pieces_;      // of the last row block and chunk
  int64_t head_pieces_;      // into how many pieces its rows are cut
  int64_t head_tasks_;       // tasks of a batch entry and kv head: pieces times chunks
  int64_t interleaved_ = 1;  // the last so many heads are taken together, longest tasks of all of them first
  bool in_shares_;
  bool last_longest_;  // the last rows attend most keys
};

// The most tasks that a plan can be cut into.
int64_t most_tasks(const plan& plan);

}  // namespace manyhead
