// The flag-ordered bodies, compiled for threads.
#include "flag_blocks.h"

#include "../../device/flag_block.h"
#include "block_threads.h"
#include "host_context.h"

namespace pyparallel::host {

void run_flag_block(const FlagArgs& args, u32 block) {
  const u32 rank = block / args.shape.nchannels, channel = block % args.shape.nchannels;
  pyparallel::run_flag_block(HostContext{}, args, rank, channel);
}

void run_flag_blocks(const FlagArgs& args) {
  BlockThreads::instance().run(
      args.shape.nranks * args.shape.nchannels,
      [](void* context, u32 block) {
        run_flag_block(*static_cast<const FlagArgs*>(context), block);
      },
      const_cast<FlagArgs*>(&args));
}

}  // namespace pyparallel::host
