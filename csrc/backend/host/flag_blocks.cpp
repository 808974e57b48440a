// The flag-ordered bodies, compiled for threads.
#include "flag_blocks.h"

#include "../../device/element_type.h"
#include "../../device/flag_ordered.h"
#include "block_threads.h"
#include "host_context.h"

namespace pyparallel::host {
namespace {

void run_block(const FlagArgs& args, u32 block) {
  const HostContext context;
  const u32 rank = block / args.shape.nchannels, channel = block % args.shape.nchannels;
  if (args.shape.algorithm == FlagAlgorithm::kChainBroadcast) {
    run_flag_ordered<CopyOnly>(context, args, rank, channel);
    return;
  }
  with_element_type(args.dtype,
                    [&]<class T>() { run_flag_ordered<T>(context, args, rank, channel); });
}

}  // namespace

void run_flag_blocks(const FlagArgs& args) {
  BlockThreads::instance().run(
      args.shape.nranks * args.shape.nchannels,
      [](void* context, u32 block) { run_block(*static_cast<const FlagArgs*>(context), block); },
      const_cast<FlagArgs*>(&args));
}

}  // namespace pyparallel::host
