// C[i] = op(A[i]) op(B[i]), or C[i] += that, row-major, for AMD's GPUs.
//
// A block computes 32 x 32 of C in steps of 16 depths by 2 x 2 wavefronts: on matrix cores with 16x16x16 each,
// otherwise on the FP32 ALUs.
//
// Constants: T, the element type, which is ELEMENT_*; OUT, that of C; A_TRANSPOSED (A is stored k x m), B_TRANSPOSED
// (n x k).
#include "windrow.cuh"

constexpr int TILE = 32, DEPTH = 16, PITCH = DEPTH + 4, THREADS = 4 * WAVEFRONT;
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

#ifdef MATRIX_CORES

#ifdef ELEMENT_F16
constexpr bool IS_F16 = true;
#else
constexpr bool IS_F16 = false;
#endif

struct Sums {
    MatrixSums sum = {};

    static __device__ __forceinline__ int first_row() { return threadIdx.x / WAVEFRONT / 2 * 16; }
    static __device__ __forceinline__ int first_column() { return threadIdx.x / WAVEFRONT % 2 * 16; }

    __device__ __forceinline__ void multiply(const S (&a)[TILE][PITCH], const S (&b)[TILE][PITCH]) {
        const int lane = threadIdx.x % 16;
        S x[MATRIX_ELEMENTS], y[MATRIX_ELEMENTS];
#pragma unroll
        for (int i = 0; i < MATRIX_ELEMENTS; i++) {
            x[i] = a[first_row() + lane][matrix_depth(i)];
            y[i] = b[first_column() + lane][matrix_depth(i)];
        }
        multiply_matrices(x, y, IS_F16, sum);
    }

    template <class F> __device__ __forceinline__ void for_each(F f) const {
#pragma unroll
        for (int i = 0; i < MATRIX_SUMS; i++) {
            f(first_row() + matrix_row(i), first_column() + (int)threadIdx.x % 16, sum[i]);
        }
    }
};

#else

struct Sums {
    static constexpr int COLUMNS = TILE * TILE / THREADS;
    float sum[COLUMNS] = {};

    static __device__ __forceinline__ int row() { return threadIdx.x / (TILE / COLUMNS); }
    static __device__ __forceinline__ int first_column() { return threadIdx.x % (TILE / COLUMNS) * COLUMNS; }

    __device__ __forceinline__ void multiply(const S (&a)[TILE][PITCH], const S (&b)[TILE][PITCH]) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const float x = T::to_float(a[row()][d]);
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) sum[i] = fmaf(x, T::to_float(b[first_column() + i][d]), sum[i]);
        }
    }

    template <class F> __device__ __forceinline__ void for_each(F f) const {
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) f(row(), first_column() + i, sum[i]);
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
