// What kernels find built in with hiprtc, for clang without any header of HIP's.
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define BUILT_IN static __device__ __forceinline__

struct __attribute__((aligned(8))) uint2 { unsigned x, y; };
struct __attribute__((aligned(16))) uint4 { unsigned x, y, z, w; };
struct __attribute__((aligned(8))) int2 { int x, y; };
struct __attribute__((aligned(16))) int4 { int x, y, z, w; };
struct __attribute__((aligned(8))) float2 { float x, y; };
struct __attribute__((aligned(16))) float4 { float x, y, z, w; };
struct __attribute__((aligned(16))) ulonglong2 { unsigned long long x, y; };
BUILT_IN ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
BUILT_IN int2 make_int2(int x, int y) { return {x, y}; }
BUILT_IN uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
BUILT_IN uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
BUILT_IN float2 make_float2(float x, float y) { return {x, y}; }
BUILT_IN float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// threadIdx, blockIdx, blockDim, gridDim: members that are read through functions. The numbers of blocks and of their
// threads lie behind the kernel's own arguments, as metadata of code objects of version 5 say.
#define HIDDEN(type, index) (((const __attribute__((address_space(4))) type *)__builtin_amdgcn_implicitarg_ptr())[index])
#define COORDINATES(name, of_x, of_y, of_z)                                                                 \
    struct name##_t {                                                                                       \
        __declspec(property(get = get_x)) unsigned x;                                                       \
        __declspec(property(get = get_y)) unsigned y;                                                       \
        __declspec(property(get = get_z)) unsigned z;                                                       \
        __device__ __forceinline__ unsigned get_x() const { return of_x; }                                  \
        __device__ __forceinline__ unsigned get_y() const { return of_y; }                                  \
        __device__ __forceinline__ unsigned get_z() const { return of_z; }                                  \
    };                                                                                                      \
    static const __device__ name##_t name
COORDINATES(threadIdx, __builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(),
            __builtin_amdgcn_workitem_id_z());
COORDINATES(blockIdx, __builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(),
            __builtin_amdgcn_workgroup_id_z());
COORDINATES(gridDim, HIDDEN(unsigned, 0), HIDDEN(unsigned, 1), HIDDEN(unsigned, 2));
COORDINATES(blockDim, HIDDEN(unsigned short, 6), HIDDEN(unsigned short, 7), HIDDEN(unsigned short, 8));

BUILT_IN float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
BUILT_IN float fminf(float a, float b) { return __builtin_fminf(a, b); }
BUILT_IN float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
BUILT_IN float fabsf(float x) { return __builtin_fabsf(x); }
BUILT_IN unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
BUILT_IN float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
BUILT_IN int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
BUILT_IN float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
BUILT_IN unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
BUILT_IN int min(int a, int b) { return a < b ? a : b; }
BUILT_IN int max(int a, int b) { return a > b ? a : b; }
BUILT_IN unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
BUILT_IN void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
BUILT_IN void __threadfence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
BUILT_IN void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
BUILT_IN unsigned atomicCAS(unsigned *at, unsigned expected, unsigned value) {
    __hip_atomic_compare_exchange_strong(at, &expected, value, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                         __HIP_MEMORY_SCOPE_AGENT);
    return expected;
}
BUILT_IN unsigned long long atomicAdd(unsigned long long *at, unsigned long long value) {
    return __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
BUILT_IN unsigned atomicMax(unsigned *at, unsigned value) {
    return __hip_atomic_fetch_max(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
