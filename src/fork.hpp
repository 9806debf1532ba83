// Forked processes, which have none of their parent's threads.
#pragma once

namespace manyhead {

// Calls `child` in each child that is forked from now on. To be called once for each function.
void when_forked(void (*child)());

// Whether this process was forked, and has been the same program since; false where the system does not tell.
bool was_forked();

}  // namespace manyhead
