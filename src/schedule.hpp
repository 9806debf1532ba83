// Which tasks the first pass of a plan is cut into for a number of workers, and the order in which they are taken. Only
// this depends on the number of workers, and no bit of a result depends on this: a row block of the plan is cut at the
// borders of its panels alone, so that every panel holds the same rows whatever the cut.
#pragma once

#include <vector>

#include "plan.hpp"

namespace manyhead {

task_cut cut_for(const plan& plan, int64_t workers);

// With so many threads each may have a share of the tasks of its own (deal.hpp): of a plan but for its call, which reads and writes
// so many bytes in all.
int64_t share_threads_of(const plan& plan, double bytes, int64_t l2_bytes);

class schedule {
 public:
  schedule(const plan& plan, int64_t workers);

  int64_t tasks() const { return cut_.heads * cut_.head_tasks; }
  bool in_shares() const { return cut_.in_shares; }  // whether each worker has a share of its own (deal.hpp)
  kernel_task at(int64_t index) const;               // the task that is taken as number index, without scratch

  // The share of the busiest worker over the mean, where each worker takes the next task when it has done its last one
  // and time is cost, shares or not. 1 = perfect. Lengths in memory are not known: as if full.
  double balance() const;

  // Costs of the tasks in the order in which they are taken: the (row, key) pairs that their panels compute, whole
  // vectors of rows, plus what a row costs whatever its keys; one and a half times as much for each of the plan's
  // last_rows; and what weights cost. The unit is a pair.
  std::vector<double> costs() const;

 private:
  struct place {
    int64_t head, position;  // of a batch entry and kv heads; of the task among their own, longest first
  };
  place place_of(int64_t index) const;
  void put_rows(int64_t position, kernel_task& t) const;
  void put_heads(int64_t head, kernel_task& t) const;
  double cost_of(int64_t position) const;  // for one kv head

  const plan& plan_;
  int64_t workers_;
  task_cut cut_;
};

// Block `block` of a kv head's rows, of which all blocks but the last have as many; that one may have more or fewer.
struct row_blocks {
  int64_t count, block_rows, all_rows;
  void put(int64_t block, kernel_task& t) const {
    t.row_block = block;
    t.row_begin = block * block_rows;
    t.row_end = block + 1 < count ? t.row_begin + block_rows : all_rows;
  }
};

// The most tasks that a plan can be cut into.
int64_t most_tasks(const plan& plan);

}  // namespace manyhead
