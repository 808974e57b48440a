// Flag-ordered launches on the host: a thread for each block (rank, channel).
#pragma once
#include "../../device/connection.h"

namespace pyparallel::host {

// Any number of blocks can run at the same time; more threads than this would only be switched more
// often.
constexpr u32 kMaxFlagChannels = 8;

// Runs all blocks of the launch and returns when the last has left. A wait that expires is in the
// failure record.
void run_flag_blocks(const FlagArgs& args);
// One of them: block b runs rank b / nchannels on channel b % nchannels.
void run_flag_block(const FlagArgs& args, u32 block);

}  // namespace pyparallel::host
