// Runs a set of unordered tasks on the pool, cut into tiles of about equal work.
#pragma once
#include <span>

#include "../backend.h"

namespace pyparallel::host {

// Returns when all tasks are done. Small batches run in the caller, large ones on every core.
void run_tasks(std::span<const Task> tasks);

}  // namespace pyparallel::host
