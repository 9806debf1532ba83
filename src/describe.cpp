// A plan as text (plan.hpp: describe), and the machine (machine.hpp: describe_machine).
#include <string>

#include "check.hpp"
#include "json.hpp"
#include "machine.hpp"
#include "plan.hpp"
#include "problem_line.hpp"
#include "registry.hpp"
#include "schedule.hpp"
#include "version.hpp"

namespace manyhead {

const char* const route_names[route_count] = {"tile", "decode", "matrix"};

namespace {

std::string kernel_name(const plan& plan) {
  return std::string("attention/") + dtype_name(plan.p.dtype) + "/" + route_names[plan.kernel] + "@" + plan.table->isa;
}

std::string as_json(const plan& plan, const schedule& order, int64_t threads) {
  json out;
  out.raw("{").key("problem").value(to_text(plan.p).text).key("kernel").value(kernel_name(plan).c_str());
  out.key("isa").value(plan.table->isa).key("dtype").value(dtype_name(plan.p.dtype));
  out.key("block_q").value(plan.block_q).key("block_kv").value(plan.block_kv);
  out.key("row_blocks").value(plan.row_blocks).key("last_rows").value(plan.last_rows).key("chunks").value(plan.chunks);
  out.key("chunk_keys").value(plan.chunk_keys).key("tasks").value(order.tasks());
  out.key("copies_kv").value(plan.copy_kv).key("unit_steps").value(plan.unit_steps);
  out.key("asks_in_order").value(plan.kernel == route_decode && plan.prefetch && plan.asks_in_order);
  out.key("second_pass").value(has_second_pass(plan.p));
  out.key("scratch_bytes_per_thread").value(plan.scratch_bytes).key("shared_bytes").value(plan.shared_bytes);
  out.key("flops").value(plan.flops).key("bytes").value(plan.bytes).key("tiles_skipped").value(plan.tiles_skipped);
  out.key("threads").value(threads).key("balance").value(order.balance());
  return out.raw("}").text;
}

std::string as_text(const plan& plan, const schedule& order, int64_t threads) {
  std::string text = to_text(plan.p).text;
  const auto add = [&text](const auto&... parts) { (append(text, parts), ...); };
  const auto yes = [](bool x) { return x ? "yes" : "no"; };
  const auto digits = [](double x, int count) { return std::string(number_text(x, count).digits); };
  add(": ", kernel_name(plan), " (", plan.table->isa, ", ", dtype_name(plan.p.dtype), "), block_q ", plan.block_q,
      ", block_kv ", plan.block_kv, ", row_blocks ", plan.row_blocks, ", last_rows ", plan.last_rows, ", chunks ",
      plan.chunks, " of ", plan.chunk_keys, " keys, tasks ", order.tasks(), ", copies_kv ", yes(plan.copy_kv),
      ", second_pass ", yes(has_second_pass(plan.p)), ", workspace ", plan.scratch_bytes, " per thread + ",
      plan.shared_bytes, ", ", digits(plan.flops, 4), " flops, ", digits(plan.bytes, 4), " bytes, tiles skipped ",
      digits(plan.tiles_skipped, 3), ", threads ", threads, ", balance ", digits(order.balance(), 4));
  return text;
}

}  // namespace

std::string describe(const plan& plan, bool json, int64_t threads) {
  const schedule order(plan, threads);
  return json ? as_json(plan, order, threads) : as_text(plan, order, threads);
}

std::string describe_machine() {
  const machine& m = this_machine();
  const host host = this_host();
  json out;
  out.raw("{").key("version").value(version_text).key("cpu").value(m.cpu_name.c_str());
  out.key("isa").value(current_isa().isa).key("isas").raw("{");
  for (int32_t i = 0; i < isa_count(); ++i) out.key(isa_table(i)->isa).value(isa_supported(i));
  out.raw("}").key("threads").value(max_threads()).key("cpus").value(m.cpus);
  out.key("f32_on_unit").value(m.f32_on_unit);
  out.key("l1_bytes").value(m.l1_bytes).key("l2_bytes").value(m.l2_bytes).key("l3_bytes").value(m.l3_bytes);
  out.key("cores").value(host.cores).key("numa_nodes").value(host.numa_nodes);
  out.key("memory_bytes").value(host.memory_bytes).key("os").value(host.system.c_str());
  return out.raw("}").text;
}

}  // namespace manyhead
