// What memory allows, for benchmarks: the fastest loops we know for the traffic of a collective,
// and nothing else of it.
#pragma once
#include <span>

#include "loops.h"

namespace pyparallel::host {

// Reads every source once and stores the exclusive or of them once to every destination, on every
// core. (It costs next to nothing, and shows that every source was read.) Cached stores: memcpy,
// from a block in the first-level cache where there are several sources. Streaming stores: line by
// line, with AVX2 where the processor has it.
//
// Throws ArgumentError unless pointers are multiples of 64, bytes are multiples of 256 and there
// are 1 to kMaxRanks sources and destinations. Destinations overlap nothing. A benchmark takes the
// better kind.
void move_at_limit(Stores stores, std::span<const u8* const> sources,
                   std::span<u8* const> destinations, u64 bytes);

}  // namespace pyparallel::host
