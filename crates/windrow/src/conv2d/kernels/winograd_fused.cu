// Fused Winograd convolution for sm_90a: input transform, products and output transform in one kernel; the
// transformed tensors never reach device memory.
//
// F(3, 3) runs along the width, the filter's rows are summed directly. One Winograd tile is 1 x 3 outputs: 5
// positions, 15 products per input channel where the direct sum takes 27. For each position
//
//     M[tile, k] = sum over rows r and channels c of V_r[tile, c] U_r[c, k],
//
// a product of matrices with tiles on the rows. A thread makes V in registers from pixels in shared memory, exactly
// the elements that the tensor core wants from it as operand A (hopper.cuh), so V is never stored. All positions of a
// tile stay in one thread, so the output transform is arithmetic in its registers.
//
// A block has two consumer warpgroups, which multiply 64 tiles by 64 output channels each, and a producer warpgroup
// that keeps two rings full: input boxes (per consumer) and transformed filter steps (shared by both).
//
// Constants: ELEMENT_F16, ELEMENT_BF16 or ELEMENT_F32; PRODUCTS 1 or 3 (operands split in two halves);
// EPILOGUE; CHANNELS_LAST_OUT 0 or 1; PAIRS_X, PIXEL_PITCH, PAIR_BITS (see `Lanes`); the transforms
// INPUT_INNER, INPUT_POINT, INPUT_ROW, OUTPUT; INPUT_STAGES, and INPUT_EXPONENT for f32.

#include "conv2d.cuh"
#include "hopper.cuh"

constexpr int TILE = 3, ALPHA = 5;       // outputs and positions of a tile
constexpr int TAPS_H = 3;                // rows of the filter
constexpr int PAIR_PIXELS = 2 * TILE + 2; // inputs of two neighbouring tiles
constexpr int PAIRS = 32;                // pairs of tiles of a warpgroup
constexpr int BLOCK_K = 64;              // output channels of a block
constexpr int STEP_C = 16;               // input channels of one product
constexpr int PIXEL_BYTES = 64;          // of one pixel in a stage: 32 half or 16 float channels
constexpr int STAGE_STEPS = PIXEL_BYTES / sizeof(Element) / STEP_C;
constexpr int PART_BYTES = STEP_C * BLOCK_K * 2; // one position of U, one step: 16 x 64 halves
constexpr int PARTS = PRODUCTS == 1 ? 1 : 2;     // high and low half
constexpr int U_BYTES = ALPHA * PARTS * PART_BYTES;
constexpr int CONSUMER_WARPS = 8;
// Together 504 for each lane of a warp of the three groups. One product of f32 asks the producer for input most often.
constexpr int PRODUCER_REGISTERS = IS_F32 && PRODUCTS == 1 && CHANNELS_LAST_OUT ? 40 : 24;
constexpr int CONSUMER_REGISTERS = (504 - PRODUCER_REGISTERS) / 2;

constexpr float INNER[ALPHA - 1][ALPHA - 1] = INPUT_INNER;
constexpr float LAST[ALPHA] = INPUT_ROW;
constexpr float POINT = INPUT_POINT;
constexpr float AT[TILE][ALPHA] = OUTPUT;

struct Params {
    TensorMap x;                // channels-last, boxes of [1, box_rows, PIXEL_PITCH, PIXEL_BYTES]
    const unsigned char* u;     // [k block, step, row, U_BYTES]
    const float* u_inverse;     // [k]: undoes the scale of U (f32)
    const u32* x_max;           // [n]: bits of the largest finite |x| of an image (f32)
    const void* bias;           // [k] or null
    float2* sums;               // [block, FLUSHED, consumer thread] (with FLUSHES)
    Element* y;
    i64 y_n, y_k, y_h, y_w;     // strides of y in elements
    i64 bias_stride;
    int bias_is_float;
    int n, k, oh, ow;
    int pad_h, pad_w;
    int steps;                  // ceil(c / 16)
    Divisor image_rows;         // rows of tiles given to an image: oh, or oh rounded up to whole units
    Divisor strips;             // ceil(ow / (PAIRS_X * 6))
    int units;                  // of 32 pairs, over all strips
    Divisor k_blocks;
    int box_rows;
    int stage_bytes;            // of one input stage
    int u_stages;
    int chunk_steps;            // after which sums are flushed
    int u_resident;             // all steps of a k block fit the ring: loaded once
    int paired_out;             // y_w == 1, ow is even and two neighbouring outputs are aligned as one vector
};

// ---- which tiles a unit holds ----

// Tiles are counted in pairs along x, then over the rows of all images: pair = (image * image_rows + row) * PAIRS_X
// + column. Unit u of a strip is pairs 32 u .. 32 u + 31. Its input rows lie in shared memory image after image, each
// image's rows starting at an even row (the copy engine wants 128-byte aligned rows, and boxes may have two rows).
struct Unit {
    int x0;         // first output column
    int image, row; // of the first pair
    int pair;       // number of the first pair in the strip

    __device__ __forceinline__ Unit(const Params& p, int unit) {
        const int row_of_units = p.strips.divide(unit), strip = unit - row_of_units * p.strips.value;
        pair = row_of_units * PAIRS;
        x0 = strip * PAIRS_X * 2 * TILE;
        const int first = pair / PAIRS_X;
        image = p.image_rows.divide(first);
        row = first - image * p.image_rows.value;
    }

    // Boxes that hold its input: those of its first image, of whole images, of its last one.
    __device__ __forceinline__ int boxes(const Params& p) const {
        const int image_rows = p.image_rows.value, last = (pair + PAIRS - 1) / PAIRS_X;
        int last_image = p.image_rows.divide(last), last_row = last - last_image * image_rows;
        if (last_image >= p.n) {
            last_image = p.n - 1;
            last_row = image_rows - 1;
        }
        if (last_image == image) return boxes_of(p, last_row - row);
        return boxes_of(p, image_rows - 1 - row) + (last_image - image - 1) * boxes_of(p, image_rows - 1) +
               boxes_of(p, last_row);
    }

    // For output rows 0 ..= `rows` of an image.
    __device__ __forceinline__ static int boxes_of(const Params& p, int rows) {
        return (rows + TAPS_H + p.box_rows - 1) / p.box_rows;
    }

    // Row in shared memory where the input of `other_image` would have its row 0.
    __device__ __forceinline__ int stage_row(const Params& p, int other_image) const {
        const int first = even(p.image_rows.value - row + TAPS_H - 1);
        const int whole = even(p.image_rows.value + TAPS_H - 1);
        return other_image == image ? -row : first + (other_image - image - 1) * whole;
    }

    __device__ __forceinline__ static int even(int rows) { return (rows + 1) & ~1; }
};

// A thread's pair of tiles.
struct Tiles {
    int image, row, column; // row and column of outputs; the column within the strip
    int stage_row;          // of the first input row

    __device__ __forceinline__ Tiles(const Params& p, const Unit& unit, int pair) {
        const int all_rows = (unit.pair + pair) / PAIRS_X;
        image = p.image_rows.divide(all_rows);
        row = all_rows - image * p.image_rows.value;
        column = (unit.pair + pair - all_rows * PAIRS_X) * 2 * TILE;
        stage_row = unit.stage_row(p, image) + row;
    }
};

// ---- producer ----

// An item is two units, one for each consumer, times one block of output channels.
struct Item {
    int k_block;
    int number; // of the unit; may lie beyond the last one
    int unit;   // one that exists

    __device__ __forceinline__ Item(const Params& p, int item, int consumer) {
        const int pair = p.k_blocks.divide(item);
        k_block = item - pair * p.k_blocks.value;
        number = pair * 2 + consumer;
        unit = min(number, p.units - 1);
    }

    __device__ __forceinline__ static int count(const Params& p) { return (p.units + 1) / 2 * p.k_blocks.value; }
};

// A ring's `empty` barriers lie this far behind the `full` ones.
constexpr int X_EMPTY = 2 * 8 * INPUT_STAGES;

__device__ __forceinline__ void produce_input(const Params& p, int consumer, u32 stages, u32 full) {
    Ring ring;
    for (int item = blockIdx.x; item < Item::count(p); item += gridDim.x) {
        const Unit unit(p, Item(p, item, consumer).unit);
        const u32 box_bytes = p.box_rows * PIXEL_PITCH * PIXEL_BYTES, bytes = unit.boxes(p) * box_bytes;
#pragma unroll 1
        for (int step = 0; step < p.steps; step += STAGE_STEPS) {
            const u32 barrier = full + 8 * ring.slot;
            barrier_wait(barrier + X_EMPTY, ring.parity ^ 1);
            barrier_expect(barrier, bytes);
            u32 to = stages + ring.slot * p.stage_bytes;
            const u32 end = to + bytes;
            int image = unit.image, row = unit.row;
#pragma unroll 1
            do {
                copy_box(to, &p.x, barrier, step * STEP_C, unit.x0 - p.pad_w, row - p.pad_h, image);
                to += box_bytes;
                row += p.box_rows;
                if (row >= static_cast<int>(p.image_rows.value) + TAPS_H - 1) {
                    row = 0;
                    image++;
                }
            } while (to != end);
            ring.advance(INPUT_STAGES);
        }
    }
}

__device__ __forceinline__ void produce_filter(const Params& p, u32 stages, u32 full, u32 empty) {
    const int block_steps = p.steps * TAPS_H;
    Ring ring;
    for (int item = blockIdx.x; item < Item::count(p); item += gridDim.x) {
        const unsigned char* u = p.u + static_cast<i64>(Item(p, item, 0).k_block) * block_steps * U_BYTES;
#pragma unroll 1
        for (int s = 0; s < block_steps; s++) {
            barrier_wait(empty + 8 * ring.slot, ring.parity ^ 1);
            barrier_expect(full + 8 * ring.slot, U_BYTES);
            copy_bytes(stages + ring.slot * U_BYTES, u, U_BYTES, full + 8 * ring.slot);
            u += U_BYTES;
            ring.advance(p.u_stages);
        }
        if (p.u_resident) return;
    }
}

// ---- input transform ----

// Two tiles that lie side by side share 2 of their 5 inputs each. With b the last point, the rows of all other
// points are those of the smaller transform without b, applied to the differences d[i+1] - b d[i]; these are shared
// between the tiles as well.
template <class T, class Fma>
__device__ __forceinline__ void transform_pair(const T (&d)[PAIR_PIXELS], T (&v)[2][ALPHA], Fma fma) {
    T w[PAIR_PIXELS - 1];
#pragma unroll
    for (int i = 0; i < PAIR_PIXELS - 1; i++) w[i] = fma(-POINT, d[i], d[i + 1]);
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int a = 0; a < ALPHA; a++) {
            // Rows are monic: the highest coefficient is 1.
            const bool last_point = a == ALPHA - 2;
            const int row = a == ALPHA - 1 ? ALPHA - 2 : a;
            const int degree = last_point ? ALPHA - 2 : a == ALPHA - 1 ? ALPHA - 2 : ALPHA - 3;
            T sum = last_point ? d[TILE * t + degree] : w[TILE * t + degree];
#pragma unroll
            for (int j = 0; j < degree; j++) {
                const float c = last_point ? LAST[j] : INNER[row][j];
                if (c != 0) sum = fma(c, last_point ? d[TILE * t + j] : w[TILE * t + j], sum);
            }
            v[t][a] = sum;
        }
    }
}

// Where a thread's pixels lie: for lane group g of a warp, the pair of tiles whose number in the unit has the bits of
// (8 warp + g) at the positions PAIR_BITS, chosen by the host so that a warp's loads fall into different banks.
__device__ __forceinline__ int pair_of(int warp, int g) {
    constexpr int BITS[5] = PAIR_BITS;
    const int source = warp * 8 + g;
    int pair = 0;
#pragma unroll
    for (int i = 0; i < 5; i++) pair |= (source >> i & 1) << BITS[i];
    return pair;
}

// The copy engine swizzles boxes of 64-byte pixels: 16-byte chunk j of pixel p is stored as chunk j ^ (p / 2 % 4).
// Addresses of the 8-byte piece `q` of the 8 pixels from `pixel` on; those further away are 512 bytes on.
__device__ __forceinline__ void pixel_addresses(u32 (&address)[8], u32 stages, int pixel, int q) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 p = pixel + i;
        address[i] = stages + p * PIXEL_BYTES + ((q >> 1 ^ (p >> 1 & 3)) << 4) + (q & 1) * 8;
    }
}

// A thread's operand A for every position, from 8 pixels in row `tap` of its pair.
#ifdef ELEMENT_F32

__device__ __forceinline__ void load_operands(u32 (&a)[PARTS][ALPHA][4], const u32 (&address)[8],
                                              u32 offset, int tap, float scale) {
#pragma unroll
    for (int half = 0; half < 2; half++) { // channels 0-7 and 8-15 of the step
        float d[2][PAIR_PIXELS];
#pragma unroll
        for (int i = 0; i < PAIR_PIXELS; i++) {
            const int pixel = tap * PIXEL_PITCH + i;
            const uint2 raw = load_shared_v2((address[pixel & 7] + offset ^ half * 32) + (pixel >> 3) * 512);
            d[0][i] = __uint_as_float(raw.x) * scale;
            d[1][i] = __uint_as_float(raw.y) * scale;
        }
        float v[2][2][ALPHA];
        const auto fma = [](float c, float x, float y) { return fmaf(c, x, y); };
        transform_pair(d[0], v[0], fma);
        transform_pair(d[1], v[1], fma);
#pragma unroll
        for (int t = 0; t < 2; t++) {
#pragma unroll
            for (int i = 0; i < ALPHA; i++) {
                const u32 high = floats_to_f16x2(v[0][t][i], v[1][t][i]);
                a[0][i][2 * half + t] = high;
                if (PRODUCTS == 3) {
                    const float2 rounded = unpack_f16x2(high);
                    a[PARTS - 1][i][2 * half + t] = floats_to_f16x2(v[0][t][i] - rounded.x, v[1][t][i] - rounded.y);
                }
            }
        }
    }
}

#else

__device__ __forceinline__ void load_operands(u32 (&a)[PARTS][ALPHA][4], const uint2 (&raw)[PAIR_PIXELS]) {
    const auto fma = [](float c, u32 x, u32 y) { return fma_x2(c, x, y); };
#pragma unroll
    for (int half = 0; half < 2; half++) { // channels 4q, 4q + 1, then 4q + 2, 4q + 3
        u32 d[PAIR_PIXELS], v[2][ALPHA];
#pragma unroll
        for (int i = 0; i < PAIR_PIXELS; i++) d[i] = half ? raw[i].y : raw[i].x;
        transform_pair(d, v, fma);
#pragma unroll
        for (int t = 0; t < 2; t++) {
#pragma unroll
            for (int i = 0; i < ALPHA; i++) a[0][i][2 * half + t] = v[t][i];
        }
    }
}

#endif

// ---- output ----

// What the epilogue needs of a block's output channels, one copy for each warp.
struct Channels {
    float scale[BLOCK_K];
    float bias[BLOCK_K];

    __device__ __forceinline__ void load(const Params& p, int k0, int lane) {
        __syncwarp();
#pragma unroll
        for (int i = lane; i < BLOCK_K; i += 32) {
            const int k = k0 + i;
            float b = 0;
            if (p.bias != nullptr && k < p.k)
                b = p.bias_is_float ? static_cast<const float*>(p.bias)[k * p.bias_stride]
                                    : to_float(static_cast<const Element*>(p.bias)[k * p.bias_stride]);
            bias[i] = b;
            scale[i] = p.u_inverse != nullptr && k < p.k ? p.u_inverse[k] : 1;
        }
        __syncwarp();
    }
};

// Tensor cores cut off when they add, so that the error of a sum grows with its length. Split operands are worth more:
// after some steps their sums go to memory of the thread and start again.
constexpr bool FLUSHES = PRODUCTS == 3;
constexpr int FLUSHED = 8 * 2 * TILE; // pairs of sums of a thread: accumulator columns j, tiles t, outputs

struct Flush {
    float2* sums; // of this thread
    bool first, last;

    __device__ __forceinline__ Flush(const Params& p, bool first, bool last)
        : sums(p.sums + static_cast<i64>(blockIdx.x) * (FLUSHED * 256) + threadIdx.x), first(first), last(last) {}

    // Earlier sums of column j and tile t: channels e = 0, 1 of each output.
    __device__ __forceinline__ void load(float2 (&v)[TILE], int j, int t) const {
#pragma unroll
        for (int o = 0; o < TILE; o++) v[o] = first ? make_float2(0, 0) : sums[((2 * j + t) * TILE + o) * 256];
    }
};

// The three outputs of a tile from its five sums, before scale, bias and activation.
__device__ __forceinline__ void transform_output(float (&y)[TILE], const float (&acc)[ALPHA][32], int i) {
    // Positions 1 and 2 belong to points a and -a: sum and difference serve all rows.
    const float sum = acc[1][i] + acc[2][i], difference = acc[1][i] - acc[2][i];
#pragma unroll
    for (int o = 0; o < TILE; o++) {
        y[o] = fmaf(AT[o][3], acc[3][i], AT[o][1] * (o % 2 ? difference : sum));
        if (AT[o][0] != 0) y[o] += acc[0][i];
        if (AT[o][4] != 0) y[o] += acc[4][i];
    }
}

// As above for channel e of column j and tile t, with what was flushed.
__device__ __forceinline__ void transform_output(float (&y)[TILE], const float (&acc)[ALPHA][32], int j, int t, int e,
                                                 const float2 (&before)[TILE]) {
    transform_output(y, acc, 4 * j + 2 * t + e);
    if (FLUSHES) {
#pragma unroll
        for (int o = 0; o < TILE; o++) y[o] += e ? before[o].y : before[o].x;
    }
}

// The loads of column j + 1 are under way while column j is stored.
__device__ __forceinline__ void flush(const float (&acc)[ALPHA][32], const Flush& flush) {
    float2 before[2][2][TILE];
    flush.load(before[0][0], 0, 0);
    flush.load(before[0][1], 0, 1);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (j < 7) {
            flush.load(before[(j + 1) % 2][0], j + 1, 0);
            flush.load(before[(j + 1) % 2][1], j + 1, 1);
        }
#pragma unroll
        for (int t = 0; t < 2; t++) {
            float y[2][TILE];
            transform_output(y[0], acc, j, t, 0, before[j % 2][t]);
            transform_output(y[1], acc, j, t, 1, before[j % 2][t]);
#pragma unroll
            for (int o = 0; o < TILE; o++) flush.sums[((2 * j + t) * TILE + o) * 256] = make_float2(y[0][o], y[1][o]);
        }
    }
}

// Output channel of accumulator (j, e) in lane quarter q: U is packed in this order, so that the channels of a thread
// are neighbours in fours and eights.
__device__ __forceinline__ int channel_of(int q, int j, int e) {
    return 32 * (j / 4) + 8 * q + 2 * (j % 4) + e;
}

struct Place { // of a thread's pair of tiles
    i64 offset; // of its first output, channel 0
    int x;      // its column
    bool live;  // its row exists
};

// A thread has 8 neighbouring channels of 6 outputs: whole vectors.
__device__ __forceinline__ void store_channels_last(const Params& p, const float (&acc)[ALPHA][32], const Place& place,
                                                    int k0, int q, float x_scale, const Channels& channels,
                                                    const Flush& flush) {
    constexpr int VECTOR = 16 / sizeof(Element), COLUMNS_J = VECTOR / 2, ROUNDS = 32 / VECTOR;
    // Round i: channels from `first(i)` on (less k0 + 8 q), columns from `column(i)` on, tile i % 2.
    const auto first = [](int i) { return i / 2 * VECTOR / 8 * 32 + i / 2 * VECTOR % 8; };
    const auto column = [&](int i) { return first(i) / 32 * 4 + first(i) % 8 / 2; };
    float2 before[COLUMNS_J][TILE];
    const auto load = [&](int i) {
#pragma unroll
        for (int j = 0; j < COLUMNS_J; j++)
            if (FLUSHES) flush.load(before[j], column(i) + j, i % 2);
    };
    Element* to = p.y + place.offset + k0 + 8 * q;
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        load(i);
        forget(to); // that addresses of other vectors were computed from it
        float y[VECTOR][TILE];
#pragma unroll
        for (int c = 0; c < VECTOR; c++) {
            const int channel = 8 * q + first(i) + c;
            transform_output(y[c], acc, column(i) + c / 2, i % 2, c % 2, before[c / 2]);
            const float scale = channels.scale[channel] * x_scale, bias = channels.bias[channel];
#pragma unroll
            for (int o = 0; o < TILE; o++) y[c][o] = epilogue(fmaf(y[c][o], scale, bias));
        }
        const int x = TILE * (i % 2), count = place.live && k0 + 8 * q + first(i) < p.k ? p.ow - place.x - x : 0;
#pragma unroll
        for (int o = 0; o < TILE; o++) {
            float vector[VECTOR];
#pragma unroll
            for (int c = 0; c < VECTOR; c++) vector[c] = y[c][o];
            if (o < count) store_vector(to + first(i) + (x + o) * p.y_w, vector);
        }
    }
}

// Any strides: channels of a warp's 48 outputs go through shared memory, some at a time, so that neighbouring lanes store
// neighbouring columns, in pairs.
constexpr int COLUMN_PAIRS = 8 * TILE;         // of one channel
constexpr int STAGED_J = IS_F32 ? 1 : 2;       // of the 8 accumulator columns: 8 channels each
constexpr int STAGING_PITCH = IS_F32 ? 28 : 24; // pairs of one channel: a warp's accesses fall into different banks
typedef typename Access<2 * sizeof(Element)>::Type ElementPair;
constexpr int STAGING_BYTES = STAGED_J * 8 * STAGING_PITCH * sizeof(ElementPair);

__device__ __forceinline__ ElementPair pack_pair(float a, float b) {
#ifdef ELEMENT_F32
    return make_uint2(__float_as_uint(a), __float_as_uint(b));
#else
    return T::pack(a, b);
#endif
}

__device__ __forceinline__ void store_strided(const Params& p, const float (&acc)[ALPHA][32], const Place& place,
                                              int k0, int lane, float x_scale, const Channels& channels,
                                              ElementPair* staging, const Flush& flush) {
    const int g = lane >> 2, q = lane & 3;
    // A lane stores pairs lane, lane + 32, lane + 64, ... of four channels that belong to different q, and so on for the
    // next four: there are three different places.
    Element* to[3];
    int from[3], channels_left[3], columns[3];
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const int pair = (32 * i + lane) % COLUMN_PAIRS, row = (32 * i + lane) / COLUMN_PAIRS;
        const int source = pair / TILE * 4, column = pair % TILE * 2;
        const i64 offset = __shfl_sync(~0u, place.offset, source);
        const int x = __shfl_sync(~0u, place.x, source) + column;
        const bool live = __shfl_sync(~0u, static_cast<int>(place.live), source);
        const int k = k0 + channel_of(row, 0, 0);
        to[i] = p.y + offset + column * p.y_w + k * p.y_k;
        from[i] = row * STAGING_PITCH + pair;
        columns[i] = p.ow - x;
        channels_left[i] = live && columns[i] > 0 ? p.k - k : 0;
    }
    float2 before[2][TILE];
    const auto load = [&](int j) {
#pragma unroll
        for (int t = 0; t < 2; t++)
            if (FLUSHES) flush.load(before[t], j, t);
    };
#pragma unroll
    for (int j0 = 0; j0 < 8; j0 += STAGED_J) {
#pragma unroll
        for (int j = j0; j < j0 + STAGED_J; j++) {
            load(j);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int channel = channel_of(q, j, e);
                const float scale = channels.scale[channel] * x_scale, bias = channels.bias[channel];
                float y[2][TILE], of_pair[2 * TILE];
                transform_output(y[0], acc, j, 0, e, before[0]);
                transform_output(y[1], acc, j, 1, e, before[1]);
#pragma unroll
                for (int i = 0; i < 2 * TILE; i++) of_pair[i] = epilogue(fmaf(y[i / TILE][i % TILE], scale, bias));
                ElementPair* const row = staging + (4 * (2 * (j - j0) + e) + q) * STAGING_PITCH + TILE * g;
#pragma unroll
                for (int i = 0; i < TILE; i++) row[i] = pack_pair(of_pair[2 * i], of_pair[2 * i + 1]);
            }
        }
        __syncwarp();
        constexpr int COUNT = 6 * STAGED_J;
#pragma unroll
        for (int i = 0; i < 3; i++) forget(to[i]);
        const auto at = [&](int n) { return to[n % 3] + channel_of(0, j0 + n / 6, n / 3 % 2) * p.y_k; };
        const auto exists = [&](int n) { return channel_of(0, j0 + n / 6, n / 3 % 2) < channels_left[n % 3]; };
        const auto staged = [&](int n) { return staging + n / 3 * 4 * STAGING_PITCH + from[n % 3]; };
        if (p.paired_out) {
#pragma unroll
            for (int n = 0; n < COUNT; n++)
                if (exists(n)) *reinterpret_cast<ElementPair*>(at(n)) = *staged(n);
        } else {
#pragma unroll
            for (int n = 0; n < COUNT; n++) {
                if (!exists(n)) continue;
                const Element* const both = reinterpret_cast<const Element*>(staged(n));
                at(n)[0] = both[0];
                if (columns[n % 3] > 1) at(n)[p.y_w] = both[1];
            }
        }
        __syncwarp();
    }
}

// ---- consumer ----

__device__ __forceinline__ u32 x_max_of(const Params& p, int image) { return p.x_max[image < p.n ? image : p.n - 1]; }

__device__ __forceinline__ void consume(const Params& p, int consumer, int warp, int lane, u32 stages, u32 x_full,
                                        u32 x_empty, u32 u_stages, u32 u_full, u32 u_empty, Channels& channels,
                                        ElementPair* staging) {
    const int q = lane & 3, pair = pair_of(warp, lane >> 2);
    float acc[ALPHA][32];
    Ring x_ring, u_ring;
    int previous = -1;  // filter slot of the last product
    int k_loaded = -1;  // block whose `channels` are there
    // Once the product that read it is done, its slot may be filled again.
    const auto release = [&] {
        if (previous >= 0 && !p.u_resident && lane == 0) barrier_arrive(u_empty + 8 * previous);
    };

    for (int item = blockIdx.x; item < Item::count(p); item += gridDim.x) {
        const Item work(p, item, consumer);
        if (work.k_block != k_loaded) {
            k_loaded = work.k_block;
            channels.load(p, k_loaded * BLOCK_K, lane);
        }
        Tiles tiles(p, Unit(p, work.unit), pair);
        const int pixel = tiles.stage_row * PIXEL_PITCH + tiles.column;
#ifdef ELEMENT_F32
        const float x_scale = power_of_two_scale(x_max_of(p, tiles.image), INPUT_EXPONENT);
#endif

        for (int chunk0 = 0; chunk0 < p.steps; chunk0 += p.chunk_steps) {
        const int chunk_end = FLUSHES ? min(chunk0 + p.chunk_steps, p.steps) : p.steps;
        for (int step = chunk0; step < chunk_end; step += STAGE_STEPS) {
            barrier_wait(x_full + 8 * x_ring.slot, x_ring.parity);
            u32 address[8];
            pixel_addresses(address, stages + x_ring.slot * p.stage_bytes, pixel, q);
#pragma unroll
            for (int s = 0; s < STAGE_STEPS; s++) {
                if (step + s == p.steps) break;
                const bool last_step = s == STAGE_STEPS - 1 || step + s + 1 == p.steps;
#pragma unroll
                for (int tap = 0; tap < TAPS_H; tap++) {
                    // All that can be done while the last product runs comes before the wait for it.
                    const u64 u = matrix_descriptor(u_stages + u_ring.slot * U_BYTES, PART_BYTES / 2, 128);
                    barrier_wait(u_full + 8 * u_ring.slot, p.u_resident ? 0 : u_ring.parity);
                    u32 a[PARTS][ALPHA][4];
#ifdef ELEMENT_F32
                    wgmma_wait();
                    load_operands(a, address, 0, tap, x_scale);
#else
                    uint2 raw[PAIR_PIXELS];
#pragma unroll
                    for (int i = 0; i < PAIR_PIXELS; i++) {
                        const int at = tap * PIXEL_PITCH + i;
                        raw[i] = load_shared_v2((address[at & 7] ^ s * 32) + (at >> 3) * 512);
                    }
                    wgmma_wait();
                    load_operands(a, raw);
#endif
                    const int accumulate = step + s + tap != chunk0;
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < ALPHA; i++) {
                        const u64 high = u + (i * PARTS * PART_BYTES >> 4);
                        if (PRODUCTS == 3) { // low-order terms first
                            const u64 low = high + (PART_BYTES >> 4);
                            wgmma_m64n64k16(acc[i], a[PARTS - 1][i], high, accumulate);
                            wgmma_m64n64k16(acc[i], a[0][i], low, 1);
                            wgmma_m64n64k16(acc[i], a[0][i], high, 1);
                        } else {
                            wgmma_m64n64k16(acc[i], a[0][i], high, accumulate);
                        }
                    }
                    wgmma_commit();
                    release();
                    previous = u_ring.slot;
                    u_ring.advance(p.u_stages);
                    if (last_step && tap == TAPS_H - 1) {
                        __syncwarp();
                        if (lane == 0) barrier_arrive(x_empty + 8 * x_ring.slot);
                    }
                }
            }
            x_ring.advance(INPUT_STAGES);
        }
        wgmma_wait();
        release();
        previous = -1;
#pragma unroll
        for (int i = 0; i < ALPHA; i++) {
#pragma unroll
            for (int j = 0; j < 32; j++) asm volatile("" : "+f"(acc[i][j])::"memory");
        }

        const Flush chunk(p, chunk0 == 0, chunk_end == p.steps);
        if (FLUSHES && !chunk.last) {
            flush(acc, chunk);
            continue;
        }

        // Where the tiles are is computed again rather than kept in registers.
        int same_item = item;
        asm volatile("" : "+r"(same_item));
        const Item same(p, same_item, consumer);
        const Unit unit(p, same.unit);
        tiles = Tiles(p, unit, pair);
        const int x0 = unit.x0 + tiles.column, k0 = same.k_block * BLOCK_K;
        const Place place = {tiles.image * p.y_n + tiles.row * p.y_h + x0 * p.y_w, x0,
                             same.number < p.units && tiles.image < p.n && tiles.row < p.oh};
#ifdef ELEMENT_F32
        const float inverse = power_of_two_scale(x_max_of(p, tiles.image), INPUT_EXPONENT, true);
#else
        const float inverse = 1;
#endif
        if (CHANNELS_LAST_OUT)
            store_channels_last(p, acc, place, k0, q, inverse, channels, chunk);
        else
            store_strided(p, acc, place, k0, lane, inverse, channels, staging, chunk);
        }
    }
}

extern "C" __global__ __launch_bounds__(384, 1) void KERNEL(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    // Input stages of both consumers first: the swizzle wants them aligned to 512 bytes.
    const u32 x_stages = shared_address(shared);
    const u32 u_stages = x_stages + 2 * INPUT_STAGES * p.stage_bytes;
    const u32 x_full = u_stages + p.u_stages * U_BYTES, x_empty = x_full + X_EMPTY;
    const u32 u_full = x_empty + 16 * INPUT_STAGES, u_empty = u_full + 8 * p.u_stages;
    // Then, for each consumer warp, its output channels and (strided output) its staging buffer.
    unsigned char* const scratch = shared + ((u_empty + 8 * p.u_stages - x_stages + 15) & ~15);

    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * INPUT_STAGES; i++) {
            barrier_init(x_full + 8 * i, 1);
            barrier_init(x_empty + 8 * i, 4);
        }
        for (int i = 0; i < p.u_stages; i++) {
            barrier_init(u_full + 8 * i, 1);
            barrier_init(u_empty + 8 * i, CONSUMER_WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();

    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (group == 2) {
        give_registers<PRODUCER_REGISTERS>();
        if (lane == 0 && warp < 2) {
            const u32 offset = 8 * warp * INPUT_STAGES;
            produce_input(p, warp, x_stages + warp * INPUT_STAGES * p.stage_bytes, x_full + offset);
        } else if (lane == 0 && warp == 2) {
            produce_filter(p, u_stages, u_full, u_empty);
        }
    } else {
        take_registers<CONSUMER_REGISTERS>();
        const u32 offset = 8 * group * INPUT_STAGES;
        Channels* channels = reinterpret_cast<Channels*>(scratch) + group * 4 + warp;
        ElementPair* staging = reinterpret_cast<ElementPair*>(scratch + CONSUMER_WARPS * sizeof(Channels) +
                                                             (group * 4 + warp) * STAGING_BYTES);
        consume(p, group, warp, lane, x_stages + group * INPUT_STAGES * p.stage_bytes, x_full + offset,
                x_empty + offset, u_stages, u_full, u_empty, *channels, staging);
    }
}
