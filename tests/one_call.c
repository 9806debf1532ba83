/* one_call LENGTH CALLS: for a tool that counts instructions, so many calls on one thread: f32, 2 heads of size 64, LENGTH
   (up to 384) queries and keys. */
#include <manyhead/manyhead.h>
#include <stdio.h>
#include <stdlib.h>

enum { heads = 2, most = 384, head_dim = 64, size = heads * most * head_dim };
static float q[size], k[size], v[size], out[size];

int main(int argc, char** argv) {
  const int length = argc > 1 ? atoi(argv[1]) : most, calls = argc > 2 ? atoi(argv[2]) : 1;
  mh_problem problem = {0};
  mh_tensors tensors = {0};
  mh_exec exec = {0};
  mh_plan* plan = NULL;
  int i;
  if (length < 1 || length > most) return 2;
  for (i = 0; i < size; ++i) {
    q[i] = (float)(i % 7) - 3.0f;
    k[i] = (float)(i % 11) / 11.0f;
    v[i] = (float)(i % 5);
  }
  problem.struct_size = sizeof problem;
  problem.batch = 1;
  problem.heads = heads;
  problem.q_len = length;
  problem.kv_len = length;
  problem.head_dim = head_dim;
  tensors.struct_size = sizeof tensors;
  tensors.q = q;
  tensors.k = k;
  tensors.v = v;
  tensors.out = out;
  exec.struct_size = sizeof exec;
  exec.threads = 1;
  if (mh_plan_create(&problem, &plan) != MH_OK) {
    fprintf(stderr, "%s\n", mh_last_error());
    return 1;
  }
  for (i = 0; i < calls; ++i) {
    if (mh_plan_run(plan, &tensors, &exec) == MH_OK) continue;
    fprintf(stderr, "%s\n", mh_last_error());
    return 1;
  }
  mh_plan_destroy(plan);
  return 0;
}
