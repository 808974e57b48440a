// Event-ordered kernels: one launch runs a table of unordered copies or sums, its blocks split over
// them.
#include <algorithm>

#include "../../device/event_ordered.h"
#include "../../device/gpu_context.h"
#include "cuda_check.h"
#include "kernels.h"

namespace pyparallel {
namespace {

constexpr u32 kThreads = 512;
// A block has 64 KiB in flight, so smaller shares leave threads idle. 32 blocks fill a link and
// leave most of the GPU to the model. Guesses: not yet measured on a GPU.
constexpr u64 kBytesPerBlock = 64 << 10;
constexpr u64 kMaxBlocksPerTask = 32;

struct TableEntry {
  u64 rows, row_bytes, source_pitch, destination_pitch;
  u32 first_block, nblocks;
  u32 first_pointer;  // its sources, then its destinations
  u16 nsources, ndestinations;
};

// Passed by value, because memory on the device would have to outlive the launch.
struct TaskTable {
  static constexpr u32 kEntries = 48, kPointers = 216;
  u32 nentries = 0;
  u32 nblocks = 0;
  TableEntry entries[kEntries];
  void* pointers[kPointers];
};
static_assert(sizeof(TaskTable) <= 4096, "kernel parameters have 4 KiB");
static_assert(TaskTable::kPointers >= 2 * kMaxRanks, "a task must fit into an empty table");

__device__ __forceinline__ const TableEntry& entry_of_block(const TaskTable& table) {
  u32 i = 0;
  while (i + 1 < table.nentries && blockIdx.x >= table.entries[i + 1].first_block) ++i;
  return table.entries[i];
}

__device__ __forceinline__ DestinationList destinations_of(const TaskTable& table,
                                                           const TableEntry& entry) {
  return {table.pointers + entry.first_pointer + entry.nsources, entry.ndestinations, 0};
}

__global__ void __launch_bounds__(kThreads, 1)
    copy_kernel(const __grid_constant__ TaskTable table) {
  const TableEntry& entry = entry_of_block(table);
  const Rows rows{entry.rows, entry.row_bytes, entry.source_pitch, entry.destination_pitch};
  run_copy(GpuContext{}, destinations_of(table, entry),
           static_cast<const u8*>(table.pointers[entry.first_pointer]), rows,
           blockIdx.x - entry.first_block, entry.nblocks);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) sum_kernel(const __grid_constant__ TaskTable table) {
  const TableEntry& entry = entry_of_block(table);
  const SourceList sources{table.pointers + entry.first_pointer, entry.nsources, 0};
  run_sum<T>(GpuContext{}, destinations_of(table, entry), sources, entry.row_bytes,
             blockIdx.x - entry.first_block, entry.nblocks);
}

using TaskKernel = void (*)(TaskTable);
// By DType.
constexpr TaskKernel kSumKernels[kDTypes] = {sum_kernel<Half>,  sum_kernel<BFloat16>,
                                             sum_kernel<float>, sum_kernel<double>,
                                             sum_kernel<i32>,   sum_kernel<i64>};

// Tasks that wait for their common launch.
class Batch {
 public:
  Batch(TaskKernel kernel, cudaStream_t stream) : kernel_(kernel), stream_(stream) {}

  void add(const Task& task) {
    if (table_.nentries == TaskTable::kEntries ||
        npointers_ + task.nsources + task.ndestinations > TaskTable::kPointers) {
      launch();
    }
    const u64 blocks =
        std::clamp(task.rows * task.row_bytes / kBytesPerBlock, u64{1}, kMaxBlocksPerTask);
    table_.entries[table_.nentries++] = {task.rows,
                                         task.row_bytes,
                                         task.source_pitch,
                                         task.destination_pitch,
                                         table_.nblocks,
                                         static_cast<u32>(blocks),
                                         npointers_,
                                         static_cast<u16>(task.nsources),
                                         static_cast<u16>(task.ndestinations)};
    table_.nblocks += static_cast<u32>(blocks);
    // The kernel reads sources through pointers to const.
    for (u32 k = 0; k < task.nsources; ++k)
      table_.pointers[npointers_++] = const_cast<void*>(task.sources[k]);
    for (u32 k = 0; k < task.ndestinations; ++k)
      table_.pointers[npointers_++] = task.destinations[k];
  }

  void launch() {
    if (table_.nentries == 0) return;
    void* arguments[] = {&table_};
    PP_CUDA(cudaLaunchKernel(reinterpret_cast<const void*>(kernel_), dim3(table_.nblocks),
                             dim3(kThreads), arguments, 0, stream_));
    table_.nentries = table_.nblocks = npointers_ = 0;
  }

 private:
  TaskKernel kernel_;
  cudaStream_t stream_;
  TaskTable table_;
  u32 npointers_ = 0;
};

}  // namespace

void load_event_kernels() {
  cudaFuncAttributes attributes;
  PP_CUDA(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(copy_kernel)));
  for (const TaskKernel kernel : kSumKernels) {
    PP_CUDA(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)));
  }
}

void launch_tasks(std::span<const Task> tasks, cudaStream_t stream) {
  const auto empty = [](const Task& task) { return task.rows == 0 || task.row_bytes == 0; };
  Batch copies(copy_kernel, stream);
  for (const Task& task : tasks) {
    if (!task.sum && !empty(task)) copies.add(task);
  }
  copies.launch();
  for (u32 dtype = 0; dtype < kDTypes; ++dtype) {
    Batch sums(kSumKernels[dtype], stream);
    for (const Task& task : tasks) {
      if (task.sum && static_cast<u32>(task.dtype) == dtype && !empty(task)) sums.add(task);
    }
    sums.launch();
  }
}

}  // namespace pyparallel
