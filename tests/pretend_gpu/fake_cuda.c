/* CUDA's runtime, driver and NVML without a GPU: "device" memory is main memory, and kernels are refused.
 *
 * Preloaded before torch's libcudart and libcuda, it shows PRETEND_GPUS GPUs (default 1) of PRETEND_GIB GiB (default
 * 79.1) with compute capability 9.0 to an unmodified CUDA build of torch. The caching allocator, expandable segments,
 * pinned memory, streams, events, CUDA IPC and out-of-memory errors are then torch's own code. kernels.py makes the
 * operations compute.
 *
 * Every wait of the host and every copy is reported to a callback. The launch of a kernel of torch fails, with the
 * kernel's name on stderr: kernels.py has no replacement for its operator. The launch of a Triton kernel does nothing.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))
/* A function that returns the same number whatever its arguments are. */
#define ALWAYS(value, name)                       \
  PUBLIC int always_##name(void) __asm__(#name);  \
  int always_##name(void) { return value; }
#define SUCCEEDS(name) ALWAYS(0, name)
#define UNSUPPORTED(name) ALWAYS(CUDA_ERROR_NOT_SUPPORTED, name)
/* A function that succeeds and writes a number to where its first argument points. More arguments do no harm. */
#define ANSWERS(value, name)                              \
  PUBLIC int answer_##name(__typeof(value) *) __asm__(#name); \
  int answer_##name(__typeof(value) *out) { *out = value; return 0; }
/* A second name of a function, whose further arguments are of no interest here. */
#define SAME(function, name) PUBLIC int same_##name(void) __asm__(#name) __attribute__((alias(#function)));
#define MAX_GPUS 16
#define CUDA_VERSION_SHOWN 13020

/* ---- reports to kernels.py ---- */
typedef void (*Report)(const char *what);
static Report report;
PUBLIC void pretend_report_to(Report function) { report = function; }
static void note(const char *what) { if (report) report(what); }
static void note_wait(void) { note("wait"); }

static int num_gpus(void) {
  const char *text = getenv("PRETEND_GPUS");
  int n = text ? atoi(text) : 1;
  return n > MAX_GPUS ? MAX_GPUS : n;
}
static size_t total_bytes(void) {
  const char *text = getenv("PRETEND_GIB");
  return (size_t)((text ? atof(text) : 79.1) * (1 << 30));
}

/* ---- memory ---- */
enum { DEVICE = 1, PINNED = 2, OPENED = 4 }; /* OPENED: device memory of another process */
typedef struct { char *at; size_t size; int device, fd, kind; } Range;
static Range *ranges;
static size_t num_ranges, room_for_ranges;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used[MAX_GPUS];
static __thread int current;
static __thread cudaError_t last_error;

static cudaError_t fail(cudaError_t error) { return last_error = error; }

static void add_range(void *at, size_t size, int device, int fd, int kind) {
  pthread_mutex_lock(&lock);
  if (num_ranges == room_for_ranges) {
    room_for_ranges = 2 * room_for_ranges + 64;
    ranges = realloc(ranges, room_for_ranges * sizeof *ranges);
  }
  ranges[num_ranges++] = (Range){at, size, device, fd, kind};
  pthread_mutex_unlock(&lock);
}
/* Copy the range of one of these kinds that holds an address (`kind` 0 if there is none), and remove it on request. */
static Range look_up(const void *address, int kinds, int remove) {
  Range result = {0};
  pthread_mutex_lock(&lock);
  for (size_t i = num_ranges; i-- > 0;) {
    Range r = ranges[i];
    if ((r.kind & kinds) && (char *)address >= r.at && (char *)address < r.at + r.size) {
      result = r;
      if (remove) ranges[i] = ranges[--num_ranges];
      break;
    }
  }
  pthread_mutex_unlock(&lock);
  return result;
}
static int reserve(int device, size_t size) {
  pthread_mutex_lock(&lock);
  int fits = used[device] + size <= total_bytes();
  if (fits) used[device] += size;
  pthread_mutex_unlock(&lock);
  return fits;
}
static void release(int device, size_t size) {
  pthread_mutex_lock(&lock);
  used[device] -= size;
  pthread_mutex_unlock(&lock);
}
static int shared_file(size_t size) {
  int fd = memfd_create("pretend-gpu", MFD_CLOEXEC);
  if (fd >= 0 && ftruncate(fd, (off_t)size)) { close(fd); return -1; }
  return fd;
}

PUBLIC cudaError_t cudaMalloc(void **out, size_t size) {
  *out = NULL;
  if (!size) return cudaSuccess;
  if (!reserve(current, size)) return fail(cudaErrorMemoryAllocation);
  int fd = shared_file(size);
  void *at = fd < 0 ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) { release(current, size); return fail(cudaErrorMemoryAllocation); }
  add_range(at, size, current, fd, DEVICE);
  *out = at;
  return cudaSuccess;
}
PUBLIC cudaError_t cudaFree(void *at) {
  if (!at) return cudaSuccess;
  Range r = look_up(at, DEVICE, 1);
  if (!r.kind) return fail(cudaErrorInvalidValue);
  munmap(r.at, r.size);
  close(r.fd);
  release(r.device, r.size);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all) {
  *all = total_bytes();
  *free_bytes = *all - used[current];
  return cudaSuccess;
}
PUBLIC cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) {
  size += !size;
  *out = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*out == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  add_range(*out, size, current, -1, PINNED);
  return cudaSuccess;
}
SAME(cudaHostAlloc, cudaMallocHost)
PUBLIC cudaError_t cudaFreeHost(void *at) {
  Range r = look_up(at, PINNED, 1);
  if (r.kind) munmap(r.at, r.size);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaHostRegister(void *at, size_t size, unsigned flags) {
  add_range(at, size, current, -1, PINNED);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaHostUnregister(void *at) { look_up(at, PINNED, 1); return cudaSuccess; }
PUBLIC cudaError_t cudaHostGetDevicePointer(void **out, void *at, unsigned flags) { *out = at; return cudaSuccess; }
PUBLIC cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *at) {
  Range r = look_up(at, DEVICE | PINNED | OPENED, 0);
  memset(a, 0, sizeof *a);
  a->type = !r.kind ? cudaMemoryTypeUnregistered : r.kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = r.kind ? r.device : -2;
  a->devicePointer = r.kind ? (void *)at : NULL;
  a->hostPointer = (void *)at;
  return cudaSuccess;
}
static void note_copy(const void *to, const void *from) {
  int to_gpu = look_up(to, DEVICE | OPENED, 0).kind, from_gpu = look_up(from, DEVICE | OPENED, 0).kind;
  if (to_gpu != from_gpu) note(to_gpu ? "upload" : "download");
}
PUBLIC cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
  memmove(to, from, n);
  note_copy(to, from);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) {
  cudaMemcpyAsync(to, from, n, k, NULL);
  note_wait();
  return cudaSuccess;
}
PUBLIC cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, cudaStream_t s) {
  memmove(to, from, n);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaMemset(void *at, int value, size_t n) { memset(at, value, n); return cudaSuccess; }
SAME(cudaMemset, cudaMemsetAsync)

/* ---- devices ---- */
PUBLIC cudaError_t cudaGetDeviceCount(int *n) {
  *n = num_gpus();
  return *n ? cudaSuccess : fail(cudaErrorNoDevice);
}
ANSWERS(current, cudaGetDevice) SAME(cudaGetDevice, cuCtxGetDevice)
PUBLIC cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_gpus()) return fail(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}
ANSWERS(1, cudaDeviceCanAccessPeer) ANSWERS(CUDA_VERSION_SHOWN, cudaDriverGetVersion)
ANSWERS(CUDA_VERSION_SHOWN, cudaRuntimeGetVersion) ANSWERS(CUDA_VERSION_SHOWN, cuDriverGetVersion)
ANSWERS(CUDA_VERSION_SHOWN, nvmlSystemGetCudaDriverVersion_v2)
PUBLIC cudaError_t cudaDeviceGetPCIBusId(char *text, int n, int device) {
  snprintf(text, (size_t)n, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
static int attribute(int name) { /* of an H100 */
  switch (name) {
  case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
  case cudaDevAttrMaxBlockDimZ: return 64;
  case cudaDevAttrMaxGridDimX: return 2147483647;
  case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
  case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
  case cudaDevAttrWarpSize: return 32;
  case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
  case cudaDevAttrMultiProcessorCount: return 132;
  case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
  case cudaDevAttrL2CacheSize: return 50 << 20;
  case cudaDevAttrComputeCapabilityMajor: return 9;
  case cudaDevAttrClockRate: return 1980000;
  case cudaDevAttrMemoryClockRate: return 2619000;
  case cudaDevAttrGlobalMemoryBusWidth: return 5120;
  case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch: case cudaDevAttrMemoryPoolsSupported:
  case cudaDevAttrClusterLaunch: case cudaDevAttrIpcEventSupport:
  case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: return 1;
  }
  return 0;
}
PUBLIC cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device) {
  *value = attribute(name);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  memcpy(p->uuid.bytes, "pretended-GPU-", 14);
  p->uuid.bytes[15] = (char)device;
  p->totalGlobalMem = total_bytes();
  p->major = 9;
  p->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  p->warpSize = attribute(cudaDevAttrWarpSize);
  p->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  p->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->regsPerBlock = p->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerBlock);
  p->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  for (int axis = 0; axis < 3; axis++) {
    p->maxThreadsDim[axis] = attribute(cudaDevAttrMaxBlockDimX + axis);
    p->maxGridSize[axis] = attribute(cudaDevAttrMaxGridDimX + axis);
  }
  p->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  p->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  p->pciBusID = device + 1;
  p->unifiedAddressing = p->cooperativeLaunch = p->canMapHostMemory = p->streamPrioritiesSupported = 1;
  return cudaSuccess;
}

/* ---- streams and events: all work is finished when its call returns ---- */
static void *new_token(void) {
  static uintptr_t last = 0x1000;
  return (void *)__atomic_add_fetch(&last, 16, __ATOMIC_RELAXED);
}
ANSWERS(new_token(), cudaStreamCreate) ANSWERS(new_token(), cudaStreamCreateWithFlags)
ANSWERS(new_token(), cudaStreamCreateWithPriority)
PUBLIC cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; return cudaSuccess; }
PUBLIC cudaError_t cudaDeviceSynchronize(void) { note_wait(); return cudaSuccess; }
SAME(cudaDeviceSynchronize, cudaStreamSynchronize) SAME(cudaDeviceSynchronize, cudaEventSynchronize)
PUBLIC cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t function, void *data, unsigned flags) {
  function(s, cudaSuccess, data);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) { f(data); return cudaSuccess; }
PUBLIC cudaError_t cudaDeviceGetStreamPriorityRange(int *a, int *b) { *a = 0; *b = -5; return cudaSuccess; }
PUBLIC cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
SAME(cudaStreamIsCapturing, cuStreamIsCapturing)
PUBLIC cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
  if (id) *id = 0;
  if (n) *n = 0;
  return cudaStreamIsCapturing(s, status);
}
typedef struct { struct timespec at; } Event;
PUBLIC cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = calloc(1, sizeof(Event)); return cudaSuccess; }
SAME(cudaEventCreate, cudaEventCreateWithFlags) SAME(cudaEventCreate, cudaIpcOpenEventHandle)
PUBLIC cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
PUBLIC cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  clock_gettime(CLOCK_MONOTONIC, &((Event *)e)->at);
  return cudaSuccess;
}
SAME(cudaEventRecord, cudaEventRecordWithFlags)
PUBLIC cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  struct timespec x = ((Event *)a)->at, y = ((Event *)b)->at;
  *ms = (float)((double)(y.tv_sec - x.tv_sec) * 1e3 + (double)(y.tv_nsec - x.tv_nsec) / 1e6);
  return cudaSuccess;
}
SUCCEEDS(cudaStreamDestroy) SUCCEEDS(cudaStreamQuery) SUCCEEDS(cudaStreamWaitEvent) SUCCEEDS(cudaEventQuery)
SUCCEEDS(cudaThreadExchangeStreamCaptureMode) SUCCEEDS(cudaDeviceEnablePeerAccess) SUCCEEDS(cudaDeviceReset)
SUCCEEDS(cudaProfilerStart) SUCCEEDS(cudaProfilerStop)

/* ---- memory of other processes: a handle is (process, descriptor, GPU, size) ---- */
typedef struct { int pid, fd, device; size_t size; } Handle;
PUBLIC cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *at) {
  Range r = look_up(at, DEVICE, 0);
  if (!r.kind) return fail(cudaErrorInvalidValue);
  Handle h = {getpid(), r.fd, r.device, r.size};
  memset(out, 0, sizeof *out);
  memcpy(out, &h, sizeof h);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags) {
  Handle h;
  char path[64];
  memcpy(&h, &handle, sizeof h);
  if (h.pid == getpid()) return fail(cudaErrorDeviceUninitialized); /* CUDA opens no handle in its own process */
  snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return fail(cudaErrorInvalidValue);
  *out = mmap(NULL, h.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (*out == MAP_FAILED) { close(fd); return fail(cudaErrorMapBufferObjectFailed); }
  add_range(*out, h.size, current, fd, OPENED);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaIpcCloseMemHandle(void *at) {
  Range r = look_up(at, OPENED, 1);
  if (r.kind) { munmap(r.at, r.size); close(r.fd); }
  return cudaSuccess;
}
PUBLIC cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) {
  memset(h, 0, sizeof *h);
  return cudaSuccess;
}

/* ---- errors ---- */
PUBLIC cudaError_t cudaPeekAtLastError(void) { return last_error; }
PUBLIC cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
PUBLIC const char *cudaGetErrorString(cudaError_t e) {
  return !e ? "no error" : e == cudaErrorMemoryAllocation ? "out of memory"
    : e == cudaErrorNotSupported ? "a kernel on a pretended GPU (its name is on stderr)" : "pretended CUDA error";
}
SAME(cudaGetErrorString, cudaGetErrorName)

/* ---- torch's own kernels: known by name, refused ---- */
typedef struct { const void *function; const char *name; } Kernel;
static Kernel *kernels;
static size_t num_kernels, room_for_kernels;
PUBLIC void **__cudaRegisterFatBinary(void *binary) { return calloc(1, 64); }
PUBLIC void __cudaRegisterFunction(
    void **h, const char *function, char *d, const char *name, int t, uint3 *a, uint3 *b, dim3 *c, dim3 *e, int *w) {
  if (num_kernels == room_for_kernels) {
    room_for_kernels = 2 * room_for_kernels + 4096;
    kernels = realloc(kernels, room_for_kernels * sizeof *kernels);
  }
  kernels[num_kernels++] = (Kernel){function, name};
}
PUBLIC char __cudaInitModule(void **h) { return 1; }
PUBLIC cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = *block = (dim3){1, 1, 1};
  *shared = 0;
  *(void **)stream = NULL;
  return cudaSuccess;
}
SUCCEEDS(__cudaRegisterFatBinaryEnd) SUCCEEDS(__cudaUnregisterFatBinary) SUCCEEDS(__cudaRegisterVar)
SUCCEEDS(__cudaPushCallConfiguration)
static cudaError_t refuse(const void *function) {
  const char *name = "?";
  for (size_t i = 0; i < num_kernels; i++) if (kernels[i].function == function) name = kernels[i].name;
  fprintf(stderr, "pretended GPU: refused the kernel %s\n", name);
  return fail(cudaErrorNotSupported);
}
PUBLIC cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return cudaSuccess; }
PUBLIC cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return refuse(f); }
SAME(refuse, cudaLaunchKernel) SAME(refuse, __cudaLaunchKernel) SAME(refuse, cudaLaunchCooperativeKernel)
PUBLIC cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = 90;
  return cudaSuccess;
}
ANSWERS(2, cudaOccupancyMaxActiveBlocksPerMultiprocessor) ANSWERS(2, cuOccupancyMaxActiveBlocksPerMultiprocessor)
ANSWERS(2, cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags) ANSWERS(1, cuOccupancyMaxActiveClusters)
PUBLIC cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
  static char room[1 << 16];
  *out = room;
  return cudaSuccess;
}
SUCCEEDS(cudaFuncSetAttribute) SUCCEEDS(cudaMemcpyToSymbol)

/* ---- the driver: contexts ---- */
ANSWERS(num_gpus(), cuDeviceGetCount) ANSWERS((unsigned)num_gpus(), nvmlDeviceGetCount_v2)
PUBLIC CUresult cuDeviceGet(CUdevice *device, int i) { *device = i; return CUDA_SUCCESS; }
PUBLIC CUresult cuDeviceGetName(char *text, int n, CUdevice device) {
  struct cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  snprintf(text, (size_t)n, "%s", p.name);
  return CUDA_SUCCESS;
}
PUBLIC CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device) {
  struct cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  memcpy(out, &p.uuid, 16);
  return CUDA_SUCCESS;
}
SAME(cudaDeviceGetAttribute, cuDeviceGetAttribute) ANSWERS(total_bytes(), cuDeviceTotalMem_v2)
static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(0x100 + device); }
PUBLIC CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
PUBLIC CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = context_of(d); return CUDA_SUCCESS; }
ANSWERS(context_of(current), cuCtxGetCurrent)
PUBLIC CUresult cuCtxSetCurrent(CUcontext c) {
  if (c) current = (int)((uintptr_t)c - 0x100);
  return CUDA_SUCCESS;
}
PUBLIC CUresult cuGetErrorString(CUresult e, const char **text) {
  *text = "pretended CUDA driver error";
  return CUDA_SUCCESS;
}
SAME(cuGetErrorString, cuGetErrorName)
ANSWERS((size_t)0, cuCtxGetLimit) SUCCEEDS(cuCtxSetLimit)
SUCCEEDS(cuInit) SUCCEEDS(cuDevicePrimaryCtxRelease_v2) SUCCEEDS(cuCtxPushCurrent_v2) SUCCEEDS(cuCtxPopCurrent_v2)

/* ---- the driver: virtual memory, of which expandable segments are made ---- */
typedef struct { int fd, device, references; size_t size; } Block; /* device -1: imported from another process */
static Block *block_of(CUmemGenericAllocationHandle h) { return (Block *)(uintptr_t)h; }
static CUresult new_block(CUmemGenericAllocationHandle *out, int fd, int device, size_t size) {
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  Block *b = malloc(sizeof *b);
  *b = (Block){fd, device, 1, size};
  *out = (CUmemGenericAllocationHandle)(uintptr_t)b;
  return CUDA_SUCCESS;
}
ANSWERS((size_t)2 << 20, cuMemGetAllocationGranularity)
static void *empty_room(void *at, size_t size) { /* an access ends in a segmentation fault, as on a GPU */
  int fixed = at ? MAP_FIXED : 0;
  return mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
}
PUBLIC CUresult cuMemAddressReserve(
    CUdeviceptr *out, size_t size, size_t align, CUdeviceptr hint, unsigned long long f) {
  *out = (CUdeviceptr)empty_room(NULL, size);
  return (void *)*out == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
PUBLIC CUresult cuMemAddressFree(CUdeviceptr at, size_t size) { munmap((void *)at, size); return CUDA_SUCCESS; }
PUBLIC CUresult cuMemCreate(
    CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *p, unsigned long long f) {
  if (!reserve(p->location.id, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  return new_block(out, shared_file(size), p->location.id, size);
}
PUBLIC CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
  Block *b = block_of(h);
  if (b->device >= 0) release(b->device, b->size);
  close(b->fd);
  free(b);
  return CUDA_SUCCESS;
}
PUBLIC CUresult cuMemMap(
    CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle h, unsigned long long f) {
  Block *b = block_of(h);
  void *to = mmap((void *)at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, b->fd, (off_t)offset);
  if (to == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  add_range(to, size, b->device < 0 ? current : b->device, b->fd, DEVICE);
  return CUDA_SUCCESS;
}
PUBLIC CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  empty_room((void *)at, size);
  for (Range r; (r = look_up((void *)at, DEVICE, 1)).kind && r.size < size; size -= r.size) at += r.size;
  return CUDA_SUCCESS;
}
PUBLIC CUresult cuMemExportToShareableHandle(
    void *out, CUmemGenericAllocationHandle h, CUmemAllocationHandleType type, unsigned long long f) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED; /* no fabric */
  *(int *)out = dup(block_of(h)->fd);
  return CUDA_SUCCESS;
}
PUBLIC CUresult cuMemImportFromShareableHandle(
    CUmemGenericAllocationHandle *out, void *descriptor, CUmemAllocationHandleType type) {
  struct stat s;
  int fd = dup((int)(uintptr_t)descriptor);
  if (fd < 0 || fstat(fd, &s)) return CUDA_ERROR_INVALID_VALUE;
  return new_block(out, fd, -1, (size_t)s.st_size);
}
PUBLIC CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr at) {
  Range r = look_up((void *)at, DEVICE | OPENED, 0);
  if (!r.kind) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = (CUdeviceptr)r.at;
  if (size) *size = r.size;
  return CUDA_SUCCESS;
}
PUBLIC CUresult cuPointerGetAttribute(void *out, CUpointer_attribute name, CUdeviceptr at) {
  memset(out, 0, 8);
  if (name == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)out = at;
  return CUDA_SUCCESS;
}
PUBLIC CUresult cuMemsetD32Async(CUdeviceptr at, unsigned value, size_t n, CUstream s) {
  for (size_t i = 0; i < n; i++) ((unsigned *)at)[i] = value;
  return CUDA_SUCCESS;
}
SUCCEEDS(cuMemSetAccess)

/* ---- the driver: Triton's compiled kernels load and launch, and compute nothing ---- */
ANSWERS(new_token(), cuModuleLoadData) ANSWERS(new_token(), cuModuleLoadDataEx) ANSWERS(new_token(), cuModuleLoad)
ANSWERS(new_token(), cuModuleGetFunction)
PUBLIC CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) {
  *v = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 128 : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
SUCCEEDS(cuModuleUnload) SUCCEEDS(cuFuncSetAttribute) SUCCEEDS(cuFuncSetCacheConfig) SUCCEEDS(cuLaunchKernel)
SUCCEEDS(cuLaunchKernelEx) SUCCEEDS(cuLaunchCooperativeKernel) SUCCEEDS(cuTensorMapEncodeTiled)

/* ---- the driver: functions that torch looks up by name, and that no test needs ---- */
UNSUPPORTED(cuMemRetainAllocationHandle) UNSUPPORTED(cuMemGetAllocationPropertiesFromHandle)
UNSUPPORTED(cuMulticastAddDevice) UNSUPPORTED(cuMulticastBindMem) UNSUPPORTED(cuMulticastCreate)
UNSUPPORTED(cuMulticastUnbind) UNSUPPORTED(cuMulticastGetGranularity) UNSUPPORTED(cuStreamWriteValue32_v2)
UNSUPPORTED(cuCtxFromGreenCtx) UNSUPPORTED(cuDevResourceGenerateDesc) UNSUPPORTED(cuDevSmResourceSplitByCount)
UNSUPPORTED(cuDeviceGetDevResource) UNSUPPORTED(cuGreenCtxCreate) UNSUPPORTED(cuGreenCtxDestroy)
UNSUPPORTED(cuGreenCtxStreamCreate) UNSUPPORTED(cuLinkAddData_v2) UNSUPPORTED(cuLinkComplete)
UNSUPPORTED(cuLinkCreate_v2) UNSUPPORTED(cuLogsRegisterCallback) UNSUPPORTED(cuLogsUnregisterCallback)
UNSUPPORTED(cuStreamGetCtx)

PUBLIC cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **out, unsigned v, unsigned long long f, enum cudaDriverEntryPointQueryResult *result) {
  char later[128];
  snprintf(later, sizeof later, "%s_v2", name);
  *out = dlsym(RTLD_DEFAULT, later);
  if (!*out) *out = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
PUBLIC CUresult cuGetProcAddress_v2(
    const char *name, void **out, int v, cuuint64_t f, CUdriverProcAddressQueryResult *r) {
  cudaGetDriverEntryPointByVersion(name, out, 0, 0, NULL);
  return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* ---- NVML: this library is also found under the name libnvidia-ml.so.1 ---- */
PUBLIC const char *nvmlErrorString(int error) { return error ? "pretended NVML error" : "success"; }
PUBLIC int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) {
  *handle = (void *)(uintptr_t)(i + 1);
  return (int)i < num_gpus() ? 0 : 2;
}
PUBLIC int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **handle) {
  unsigned bus = 1;
  sscanf(text, "%*x:%x", &bus);
  *handle = (void *)(uintptr_t)bus;
  return 0;
}
PUBLIC int nvmlDeviceGetUUID(void *handle, char *text, unsigned n) {
  snprintf(text, n, "GPU-70726574-656e-6465-642d-4750552d00%02x", (int)(uintptr_t)handle - 1);
  return 0;
}
PUBLIC int nvmlDeviceGetName(void *handle, char *text, unsigned n) { return cuDeviceGetName(text, (int)n, 0); }
PUBLIC int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
PUBLIC int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *out) {
  out[0] = total_bytes();
  out[2] = used[(uintptr_t)handle - 1];
  out[1] = out[0] - out[2];
  return 0;
}
PUBLIC int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *n, void *out) { *n = 0; return 0; }
SUCCEEDS(nvmlInit_v2) SUCCEEDS(nvmlInitWithFlags) SUCCEEDS(nvmlShutdown) SUCCEEDS(nvmlDeviceGetGpuFabricInfoV) /* state 0: not supported */
ALWAYS(3, nvmlDeviceGetNvLinkRemoteDeviceType) ALWAYS(3, nvmlDeviceGetNvLinkRemotePciInfo_v2) /* not supported */
