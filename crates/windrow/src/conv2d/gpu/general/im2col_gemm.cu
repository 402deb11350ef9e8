// Convolution as a product of matrices whose blocks are gathered while they are multiplied: forward, data gradient
// and weight gradient, any strides, stride, padding, dilation and groups.
//
//     out[row, column] = sum over d of a(row, d) b(d, column), for each group
//
//                      rows          columns    depth            a               b
//     FORWARD          n, oh, ow     k          r, s, c          x, gathered     w
//     with FRAMES      ot, oh, ow    k          kt, r, s, c      x, gathered     w
//     BACKWARD_DATA    n, h, w       c          r, s, k          dy, gathered    w
//     BACKWARD_WEIGHT  k             c, r, s    n, oh, ow        dy              x, gathered
//
// f32 multiplies on the plain units, f16 and bf16 on tensor cores with f32 sums; on AMD on matrix cores if they take
// the type. The weight gradient is split over images; im2col_gemm_sum.cu adds the parts in a fixed order.
//
// Constants: ELEMENT_*, PROBLEM, ALONG_ROWS (neighbouring lanes load neighbouring rows of a, otherwise neighbouring
// depth), FRAMES (images are frames of a video), EPILOGUE, RESIDUAL.

#include "conv2d.cuh"

#define FORWARD 0
#define BACKWARD_DATA 1
#define BACKWARD_WEIGHT 2

constexpr int ROWS = 64, COLUMNS = 64, DEPTH = 16, THREADS = 256;
constexpr int LOADS = ROWS * DEPTH / THREADS; // elements of each matrix that a thread loads for one step

struct Params {
    const Element* image;  // x, or dy for the data gradient; it is gathered
    const Element* other;  // w, or dy for the weight gradient
    void* out;             // y, dx of Element; parts of dw as float
    const void* bias;      // [k] or null
    const Element* residual; // laid out as y
    i64 image_n, image_c, image_h, image_w; // strides in elements
    i64 other_k, other_c, other_r, other_s; // of w; for the weight gradient dy's n, k, h, w
    i64 out_n, out_c, out_h, out_w;         // of y or dx
    i64 bias_stride;
    i64 rows;              // of one group
    i64 part;              // elements of one part of dw
    int bias_is_float;
    int columns, depth;    // of one group; depth within one image for the weight gradient
    int channels;          // of the gathered image, one group
    int other_channels;    // output channels (columns or rows) of one group
    int n, h, w;           // images; height and width of the gathered image
    int out_height, out_width; // over which rows (weight gradient: depth) run
    int r, s;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int images_per_part;
    int first_group;
    Divisor channels_by, s_by, out_width_by, r_by;
    Frames frames;
};
static_assert(PARAMS_AGREE, "as the host's structure");

// The position at which filter tap (r, s) of output position (i, j) reads the gathered image; false outside.
__device__ __forceinline__ bool position(const Params& p, int i, int j, int r, int s, int& y, int& x) {
#if PROBLEM == BACKWARD_DATA
    y = i + p.pad_h - r * p.dilation_h;
    x = j + p.pad_w - s * p.dilation_w;
    if (y < 0 || x < 0 || y % p.stride_h != 0 || x % p.stride_w != 0) return false;
    y /= p.stride_h;
    x /= p.stride_w;
#else
    y = i * p.stride_h - p.pad_h + r * p.dilation_h;
    x = j * p.stride_w - p.pad_w + s * p.dilation_w;
#endif
    return y >= 0 && y < p.h && x >= 0 && x < p.w;
}

struct Tap {
    int c, r, s;
    int frame = 0; // of the filter
    // From depth (frame, r, s, c).
    __device__ __forceinline__ Tap(const Params& p, int d) {
        const int rs = p.channels_by.divide(d);
        c = d - rs * static_cast<int>(p.channels_by.value);
        r = p.s_by.divide(rs);
        s = rs - r * static_cast<int>(p.s_by.value);
#if FRAMES
        frame = p.r_by.divide(r);
        r -= frame * p.r;
#endif
    }
};

// Output position of a row.
struct Row {
    const Element* image;
    int channel; // the first one of its group
    int n, i, j;
    bool exists;

    __device__ __forceinline__ Row(const Params& p, i64 row, int group) {
        exists = row < p.rows;
        j = static_cast<int>(row % p.out_width);
        const i64 rest = row / p.out_width;
        i = static_cast<int>(rest % p.out_height);
        n = static_cast<int>(rest / p.out_height);
        channel = group * p.channels;
        image = p.image + n * p.image_n + group * static_cast<i64>(p.channels) * p.image_c;
    }
};

#if PROBLEM == BACKWARD_WEIGHT

__device__ __forceinline__ Element load_a(const Params& p, int image, int group, i64 row, int d) {
    if (row >= p.rows || d >= p.depth) return from_float(0);
    const int i = p.out_width_by.divide(d), j = d - i * p.out_width;
    return p.other[image * p.other_k + (group * p.rows + row) * p.other_c + i * p.other_r + j * p.other_s];
}

__device__ __forceinline__ Element load_b(const Params& p, int image, int group, int d, const Tap& tap, bool exists) {
    const int i = p.out_width_by.divide(d), j = d - i * p.out_width;
    int y, x;
    if (!exists || d >= p.depth || !position(p, i, j, tap.r, tap.s, y, x)) return from_float(0);
    return p.image[image * p.image_n + (group * static_cast<i64>(p.channels) + tap.c) * p.image_c + y * p.image_h +
                   x * p.image_w];
}

#else

__device__ __forceinline__ Element load_a(const Params& p, const Row& row, int d) {
    const Tap tap(p, d);
    int y, x;
    if (!row.exists || d >= p.depth || !position(p, row.i, row.j, tap.r, tap.s, y, x)) return from_float(0);
#if FRAMES
    bool is_initial;
    const Frames& f = p.frames;
    const Element* const frame = f.find(p.image, f.number(row.n, tap.frame), is_initial);
    if (frame == nullptr) return from_float(0);
    const int c = row.channel + tap.c;
    return is_initial ? frame[c * f.initial_c + y * f.initial_h + x * f.initial_w]
                      : frame[c * p.image_c + y * p.image_h + x * p.image_w];
#else
    return row.image[tap.c * p.image_c + y * p.image_h + x * p.image_w];
#endif
}

__device__ __forceinline__ Element load_b(const Params& p, int group, int d, int column) {
    if (d >= p.depth || column >= p.columns) return from_float(0);
    const Tap tap(p, d);
#if PROBLEM == FORWARD
    const i64 k = group * static_cast<i64>(p.other_channels) + column, c = tap.c;
#else
    const i64 k = group * static_cast<i64>(p.channels) + tap.c, c = column;
#endif
    const Element* const other = FRAMES ? p.other + tap.frame * p.frames.filter_t : p.other;
    return other[k * p.other_k + c * p.other_c + tap.r * p.other_r + tap.s * p.other_s];
}

#endif

// Stores the sum of a row and column.
__device__ __forceinline__ void store(const Params& p, int part, int group, i64 row, int column, float sum) {
    if (row >= p.rows || column >= p.columns) return;
#if PROBLEM == BACKWARD_WEIGHT
    static_cast<float*>(p.out)[part * p.part + (group * p.rows + row) * p.columns + column] = sum;
#else
    const Row at(p, row, group);
    const i64 channel = group * static_cast<i64>(p.columns) + column;
    const i64 to = at.n * p.out_n + channel * p.out_c + at.i * p.out_h + at.j * p.out_w;
#if PROBLEM == FORWARD
    sum += bias_at(p, channel);
    if (RESIDUAL) sum += to_float(__ldg(p.residual + to)); // a constant: need not wait for the stores before
    sum = epilogue(sum);
#endif
    static_cast<Element*>(p.out)[to] = from_float(sum);
#endif
}

// ---- the product of one step, and the places of its sums ----

#if defined(MATRIX_CORES)

constexpr int PITCH = 4; // padding of a row in shared memory, against bank conflicts

// 4 wavefronts of 64 lanes, each 2 x 2 blocks of 16 x 16, or 8 of 32 lanes, each 1 x 2.
struct Sums {
    static constexpr int DOWN = WAVEFRONT / 32;
    MatrixSums sum[DOWN][2] = {};

    static __device__ __forceinline__ int first_row() { return threadIdx.x / WAVEFRONT / 2 * (16 * DOWN); }
    static __device__ __forceinline__ int first_column() { return threadIdx.x / WAVEFRONT % 2 * 32; }

    __device__ __forceinline__ void multiply(const Element (&a)[DEPTH][ROWS + PITCH],
                                             const Element (&b)[DEPTH][COLUMNS + PITCH]) {
        const int lane = threadIdx.x % 16;
        Element x[DOWN][MATRIX_ELEMENTS], y[2][MATRIX_ELEMENTS];
#pragma unroll
        for (int j = 0; j < MATRIX_ELEMENTS; j++) {
            const int d = matrix_depth(j);
#pragma unroll
            for (int i = 0; i < DOWN; i++) x[i][j] = a[d][first_row() + 16 * i + lane];
#pragma unroll
            for (int i = 0; i < 2; i++) y[i][j] = b[d][first_column() + 16 * i + lane];
        }
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) multiply_matrices(x[i], y[j], IS_F16, sum[i][j]);
    }

    template <class F> __device__ __forceinline__ void for_each(F f) const {
        const int lane = threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int k = 0; k < MATRIX_SUMS; k++)
                    f(first_row() + 16 * i + matrix_row(k), first_column() + 16 * j + lane, sum[i][j][k]);
    }
};

#elif defined(ELEMENT_F32) || !WINDROW_PTX

constexpr int PITCH = 4;

// Four neighbours in shared memory.
__device__ __forceinline__ void load_four(const Element* from, float (&to)[4]) {
#ifdef ELEMENT_F32
    const float4 x = *reinterpret_cast<const float4*>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
#else
    Raw<T, 4> raw;
    raw.load<4>(from);
    raw.unpack(to);
#endif
}

struct Sums {
    float sum[4][4] = {};

    __device__ __forceinline__ void multiply(const Element (&a)[DEPTH][ROWS + PITCH],
                                             const Element (&b)[DEPTH][COLUMNS + PITCH]) {
        const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            float u[4], v[4];
            load_four(&a[d][row], u);
            load_four(&b[d][column], v);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][j] = fmaf(u[i], v[j], sum[i][j]);
        }
    }

    template <class F> __device__ __forceinline__ void for_each(F f) const {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) f(threadIdx.x / 16 * 4 + i, threadIdx.x % 16 * 4 + j, sum[i][j]);
    }
};

#else

constexpr int PITCH = 8;

// 8 warps, each 16 rows by 32 columns: mma.m16n8k16 with four accumulators.
struct Sums {
    float sum[4][4] = {};

    __device__ __forceinline__ void multiply(const Element (&a)[DEPTH][ROWS + PITCH],
                                             const Element (&b)[DEPTH][COLUMNS + PITCH]) {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
        const int row = warp % 4 * 16 + g, column = warp / 4 * 32 + g;
        const auto pair = [](Element low, Element high) { return static_cast<u32>(low) | static_cast<u32>(high) << 16; };
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int d = 2 * q + i / 2 * 8, r = row + i % 2 * 8;
            x[i] = pair(a[d][r], a[d + 1][r]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int c = column + 8 * j;
            const u32 y[2] = {pair(b[2 * q][c], b[2 * q + 1][c]), pair(b[2 * q + 8][c], b[2 * q + 9][c])};
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 "
                         "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                         : "+f"(sum[j][0]), "+f"(sum[j][1]), "+f"(sum[j][2]), "+f"(sum[j][3])
                         : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
        }
    }

    template <class F> __device__ __forceinline__ void for_each(F f) const {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                f(warp % 4 * 16 + g + i / 2 * 8, warp / 4 * 32 + 8 * j + 2 * q + i % 2, sum[j][i]);
    }
};

#endif

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    __shared__ __align__(16) Element a[2][DEPTH][ROWS + PITCH];
    __shared__ __align__(16) Element b[2][DEPTH][COLUMNS + PITCH];
    // Columns in y, groups and parts in z: grids there are small.
    const i64 row0 = static_cast<i64>(blockIdx.x) * ROWS;
    const int column0 = blockIdx.y * COLUMNS;
    const int parts = PROBLEM == BACKWARD_WEIGHT ? (p.n + p.images_per_part - 1) / p.images_per_part : 1;
    const int group = p.first_group + blockIdx.z / parts, part = blockIdx.z % parts;

    // Element i of a thread in a and b: its row or column, and its depth within a step.
    const auto a_row = [](int i) { return ALONG_ROWS ? threadIdx.x % ROWS : threadIdx.x / DEPTH + i * (THREADS / DEPTH); };
    const auto a_depth = [](int i) { return ALONG_ROWS ? threadIdx.x / ROWS + i * (THREADS / ROWS) : threadIdx.x % DEPTH; };
    const auto b_column = [](int i) { return static_cast<int>(threadIdx.x / DEPTH + i * (THREADS / DEPTH)); };
    const int b_depth = threadIdx.x % DEPTH;

    Element next_a[LOADS], next_b[LOADS];
    Sums sums;
#if PROBLEM == BACKWARD_WEIGHT
    const int image0 = part * p.images_per_part, images = min(p.images_per_part, p.n - image0);
    const int image_steps = (p.depth + DEPTH - 1) / DEPTH;
    const i64 steps = static_cast<i64>(images) * image_steps;
    const Tap taps[LOADS] = {Tap(p, column0 + b_column(0)), Tap(p, column0 + b_column(1)), Tap(p, column0 + b_column(2)),
                             Tap(p, column0 + b_column(3))};
    int image = image0, d0 = 0;
    const auto load = [&](i64) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            next_a[i] = load_a(p, image, group, row0 + a_row(i), d0 + a_depth(i));
            next_b[i] = load_b(p, image, group, d0 + b_depth, taps[i], column0 + b_column(i) < p.columns);
        }
        d0 += DEPTH;
        if (d0 >= p.depth) {
            d0 = 0;
            image++;
        }
    };
#else
    const i64 steps = (p.depth + DEPTH - 1) / DEPTH;
    const Row rows[LOADS] = {Row(p, row0 + a_row(0), group), Row(p, row0 + a_row(1), group),
                             Row(p, row0 + a_row(2), group), Row(p, row0 + a_row(3), group)};
    const auto load = [&](i64 step) {
        const int d0 = static_cast<int>(step) * DEPTH;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            next_a[i] = load_a(p, rows[i], d0 + a_depth(i));
            next_b[i] = load_b(p, group, d0 + b_depth, column0 + b_column(i));
        }
    };
#endif

    if (steps > 0) load(0);
    for (i64 step = 0; step < steps; step++) {
        const int buffer = step & 1;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            a[buffer][a_depth(i)][a_row(i)] = next_a[i];
            b[buffer][b_depth][b_column(i)] = next_b[i];
        }
        __syncthreads();
        if (step + 1 < steps) load(step + 1);
        sums.multiply(a[buffer], b[buffer]);
    }
    sums.for_each([&](int row, int column, float sum) { store(p, part, group, row0 + row, column0 + column, sum); });
}
