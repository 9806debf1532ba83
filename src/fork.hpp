// Forked processes, which have none of their parent's threads.
#pragma once

namespace manyhead {

// Calls `child` in each child that is forked from now on, and `before` and `after` in its parent, by the thread that forks. To be
// called once for each function.
void when_forked(void (*child)(), void (*before)() = nullptr, void (*after)() = nullptr);

// Whether this process was forked, and has been the same program since; false where the system does not tell.
bool was_forked();

}  // namespace manyhead
