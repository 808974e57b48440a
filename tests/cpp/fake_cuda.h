// A CUDA runtime that runs nothing: it keeps, for every stream, the set of work items that come
// before what is queued next. Only what StreamOrder calls; a rule of CUDA that a call breaks ends
// the program.
#pragma once
#include <cuda_runtime_api.h>

#include <map>
#include <set>

#include "testing.h"

using Work = std::set<int>;

struct CUstream_st {
  int device;
  Work before;  // what has been queued, and what that waited for
  bool capturing = false;
};
struct CUevent_st {
  int device;
  Work before;
  bool recorded = false;
  bool captured = false;
};

namespace fake {

inline int current = -1;  // the current device; -1: no context, in which no call may be made
inline int nevents = 0;   // events that exist
inline int nworks = 0;
inline Work done;  // work that has run
inline std::map<int, CUstream_st> legacy_streams;

// Failures are planted: 1 makes the next call fail, 2 the one after it, and so on.
inline int fail_in = 0;
inline cudaError_t next_call() {
  return fail_in > 0 && --fail_in == 0 ? cudaErrorUnknown : cudaSuccess;
}
#define FAKE_CALL() \
  if (const cudaError_t planted = fake::next_call(); planted != cudaSuccess) return planted

inline CUstream_st& resolve(cudaStream_t stream) {
  EXPECT(current >= 0, "a call without a current device");
  if (stream) return *stream;
  return legacy_streams.try_emplace(current, CUstream_st{current, {}}).first->second;
}

// Queues one item of work; returns its number and, in `before`, all that it comes after.
inline int launch(cudaStream_t stream, Work& before) {
  CUstream_st& to = resolve(stream);
  before = to.before;
  to.before.insert(++nworks);
  return nworks;
}

inline void run_everything() {
  for (int work = 1; work <= nworks; ++work) done.insert(work);
}

}  // namespace fake

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  FAKE_CALL();
  EXPECT(fake::current >= 0);
  *event = new CUevent_st{fake::current, {}};
  ++fake::nevents;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  --fake::nevents;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  FAKE_CALL();
  CUstream_st& from = fake::resolve(stream);
  if (from.device != event->device) return cudaErrorInvalidResourceHandle;
  event->before = from.before;
  event->recorded = true;
  event->captured = from.capturing;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  FAKE_CALL();
  EXPECT(event->recorded, "a wait for an event that was never recorded waits for nothing");
  CUstream_st& to = fake::resolve(stream);
  // A wait for an event of a capture takes a stream into the capture; other events end it.
  if (to.capturing && !event->captured) return cudaErrorStreamCaptureIsolation;
  to.capturing = event->captured;
  to.before.insert(event->before.begin(), event->before.end());
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  FAKE_CALL();
  EXPECT(fake::current >= 0 && event->recorded);
  EXPECT(!event->captured, "a query of an event of a graph");
  for (const int work : event->before) {
    if (!fake::done.contains(work)) return cudaErrorNotReady;
  }
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  FAKE_CALL();
  EXPECT(fake::current >= 0 && flags == cudaStreamNonBlocking);
  *stream = new CUstream_st{fake::current, {}};
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  FAKE_CALL();
  const bool capturing = fake::resolve(stream).capturing;
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }

namespace pyparallel {

void set_device(int device) { fake::current = device; }

void throw_cuda_error(cudaError_t error, const char* call) {
  throw Error(message("CUDA error ", static_cast<int>(error), " in ", call));
}

}  // namespace pyparallel
