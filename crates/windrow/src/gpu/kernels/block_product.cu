// C[i] = op(A[i]) op(B[i]), or C[i] += that, row-major: for GPUs that have no library for it.
//
// A block computes 32 x 32 of C in steps of 16 depths: on AMD's matrix cores by 2 x 2 wavefronts with 16x16x16 each, on
// other chips on the plain units.
//
// Constants: T, the element type; OUT, that of C; IS_F16; A_TRANSPOSED (A is stored k x m), B_TRANSPOSED (n x k).
#include "windrow.cuh"

constexpr int TILE = 32, DEPTH = 16, PITCH = DEPTH + 4, THREADS = 256;
typedef T::Storage S;

struct Params {
    const S *a, *b;
    OUT::Storage *c;
    i64 a_row, a_batch, b_row, b_batch, c_row, c_batch; // strides in elements
    i64 m, n, k;
    i64 rows_of_tiles, columns_of_tiles, tiles; // of a matrix; of all
    int add;
};
static_assert(PARAMS_AGREE, "as the host's structure");

// 32 rows from `first` on at 16 depths from `depth` on; 0 outside. Neighbouring threads load neighbours.
template <bool DEPTH_FIRST>
__device__ __forceinline__ void load_tile(S (&tile)[TILE][PITCH], const S *x, i64 stride, i64 first, i64 rows, i64 depth,
                                          i64 depths) {
#pragma unroll
    for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
        const int row = DEPTH_FIRST ? i % TILE : i / DEPTH, d = DEPTH_FIRST ? i / TILE : i % DEPTH;
        const bool exists = first + row < rows && depth + d < depths;
        const i64 at = DEPTH_FIRST ? (depth + d) * stride + first + row : (first + row) * stride + depth + d;
        tile[row][d] = exists ? x[at] : T::from_float(0.0f);
    }
}

#ifdef WINDROW_MFMA

struct Sums {
    MatrixSums sum = {};

    static __device__ __forceinline__ int first_row() { return threadIdx.x / 64 / 2 * 16; }
    static __device__ __forceinline__ int first_column() { return threadIdx.x / 64 % 2 * 16; }

    __device__ __forceinline__ void multiply(const S (&a)[TILE][PITCH], const S (&b)[TILE][PITCH]) {
        const int lane = threadIdx.x % 16, d = threadIdx.x % 64 / 16 * 4;
        S x[4], y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = a[first_row() + lane][d + i];
            y[i] = b[first_column() + lane][d + i];
        }
        multiply_matrices(x, y, IS_F16, sum);
    }

    template <class F> __device__ __forceinline__ void for_each(F f) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            f(first_row() + (int)threadIdx.x % 64 / 16 * 4 + i, first_column() + (int)threadIdx.x % 16, sum[i]);
        }
    }
};

#else

struct Sums {
    float sum[4] = {};

    __device__ __forceinline__ void multiply(const S (&a)[TILE][PITCH], const S (&b)[TILE][PITCH]) {
        const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 4;
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const float x = T::to_float(a[row][d]);
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] = fmaf(x, T::to_float(b[column + i][d]), sum[i]);
        }
    }

    template <class F> __device__ __forceinline__ void for_each(F f) const {
#pragma unroll
        for (int i = 0; i < 4; i++) f((int)threadIdx.x / 8, (int)threadIdx.x % 8 * 4 + i, sum[i]);
    }
};

#endif

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    __shared__ __align__(16) S a[TILE][PITCH];
    __shared__ __align__(16) S b[TILE][PITCH];
    for (i64 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const i64 column0 = tile % p.columns_of_tiles * TILE, rest = tile / p.columns_of_tiles;
        const i64 row0 = rest % p.rows_of_tiles * TILE, matrix = rest / p.rows_of_tiles;
        Sums sums;
        for (i64 depth = 0; depth < p.k; depth += DEPTH) {
            load_tile<A_TRANSPOSED>(a, p.a + matrix * p.a_batch, p.a_row, row0, p.m, depth, p.k);
            load_tile<!B_TRANSPOSED>(b, p.b + matrix * p.b_batch, p.b_row, column0, p.n, depth, p.k);
            __syncthreads();
            sums.multiply(a, b);
            __syncthreads();
        }
        sums.for_each([&](int i, int j, float sum) {
            const i64 row = row0 + i, column = column0 + j;
            if (row >= p.m || column >= p.n) return;
            OUT::Storage *to = p.c + matrix * p.c_batch + row * p.c_row + column;
            if (p.add) sum += OUT::to_float(*to);
            *to = OUT::from_float(sum);
        });
    }
}
