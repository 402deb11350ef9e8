// y = x in 16-byte vectors, one a thread.
typedef long long i64;

struct Params {
    uint4 *y;
    const uint4 *x;
    i64 vectors;
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ void __launch_bounds__(256) KERNEL(const Params p) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.vectors) p.y[i] = p.x[i];
}
