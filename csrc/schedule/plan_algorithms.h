// The event-ordered algorithms, one function each; plan_broadcast() and its like choose among them.
#pragma once
#include "event_plan.h"

namespace pyparallel {

EventPlan push_plan(u32 nranks, u32 root, std::span<const Segment> segments, Staging staging,
                    EventPlan storage);
EventPlan owner_reduce(u32 nranks, u32 root, std::span<const Segment> segments,
                       std::span<const u32> present, Staging staging, EventPlan storage);
EventPlan owner_all_reduce(u32 nranks, u64 bytes, Staging staging);
EventPlan copy_chain_broadcast(u32 nranks, u32 root, std::span<const Segment> segments,
                               u64 slot_bytes);
EventPlan copy_chain_reduce(u32 nranks, u32 root, std::span<const Segment> segments,
                            std::span<const u32> present, u64 slot_bytes);
EventPlan copy_chain_all_reduce(u32 nranks, u64 bytes, u64 slot_bytes);

// Bytes of one of the chunks that two-hop cuts a payload into, when stages do not ask for smaller
// ones.
u64 two_hop_chunk_bytes(u64 bytes);
EventPlan two_hop_plan(u32 nranks, u32 root, std::span<const Segment> segments, Staging staging,
                       u64 chunk_bytes);

}  // namespace pyparallel
