// What the blocks of winograd_row.cu compute: sizes and parameters, which tiles are in a unit, and which units are in a
// work item. The constants are those of that file.

#pragma once

#include "conv2d.cuh"
#include "hopper.cuh"

constexpr int TILE = 3, ALPHA = 5;       // outputs and positions of a tile
constexpr int TAPS_H = 3;                // rows of the filter
constexpr int PAIR_PIXELS = 2 * TILE + 2; // inputs of two neighbouring tiles
constexpr int PAIRS = 32;                // pairs of tiles of a warpgroup
constexpr int BLOCK_K = 64;              // output channels of a block
constexpr int STEP_C = 16;               // input channels of one product
constexpr int PIXEL_BYTES = 64;          // of one pixel in a stage: 32 f16/bf16 or 16 f32 channels
constexpr int STAGE_STEPS = PIXEL_BYTES / sizeof(Element) / STEP_C;
constexpr int PART_BYTES = STEP_C * BLOCK_K * 2; // one position of U, one step: 16 x 64 elements
constexpr int PARTS = PRODUCTS == 1 ? 1 : 2;     // high and low part
constexpr int U_BYTES = ALPHA * PARTS * PART_BYTES;
constexpr int CONSUMER_WARPS = 8;
// Together 504 for each lane of a warp of the three groups. One product of f32 needs input from the producer most
// often.
constexpr int PRODUCER_REGISTERS = IS_F32 && PRODUCTS == 1 && CHANNELS_LAST_OUT ? 40 : 24;
constexpr int CONSUMER_REGISTERS = (504 - PRODUCER_REGISTERS) / 2;

constexpr float INNER[ALPHA - 1][ALPHA - 1] = INPUT_INNER;
constexpr float LAST[ALPHA] = INPUT_ROW;
constexpr float POINT = INPUT_POINT;
constexpr float AT[TILE][ALPHA] = OUTPUT;

struct ImageParams : Output {
    TensorMap x;                // channels-last, boxes of [1, box_rows, PIXEL_PITCH, PIXEL_BYTES]
    const unsigned char* u;     // [k block, step, row, U_BYTES]
    const float* u_inverse;     // [k]: undoes the scale of U but for 2^FILTER_EXPONENT (f32)
    const u32* x_max;           // [n]: bits of the largest finite |x| of an image (f32)
    float2* sums;               // [block, FLUSHED, consumer thread] (with FLUSHES)
    int n;
    int pad_h, pad_w;
    int steps;                  // ceil(c / 16); with FRAMES those of all frames of the filter
    Divisor image_rows;         // rows of tiles given to an image: oh, or oh rounded up to whole units
    Divisor strips;             // ceil(ow / (PAIRS_X * 6))
    int units;                  // of 32 pairs, over all strips
    Divisor k_blocks;
    int box_rows;
    int stage_bytes;            // of one input stage
    int u_stages;
    int chunk_steps;            // after which sums are flushed
    int u_resident;             // all steps of a k block fit the ring: loaded once
    int paired_out;             // y_w == 1, ow is even and two neighbours of y, and of the residual, are aligned as one
};
#if FRAMES
struct Params : ImageParams {
    TensorMap initial; // of the initial frames, like x
    Frames frames;     // of x, which lie in maps
    int frame_steps;   // of a frame of the filter, whole stages
};
#else
struct Params : ImageParams {};
#endif
static_assert(PARAMS_AGREE, "as the host's structure");

// ---- which tiles a unit holds ----

// Tiles are counted in pairs along x, then over the rows of all images: pair = (image * image_rows + row) * PAIRS_X +
// column. Unit u of a strip is pairs 32 u .. 32 u + 31. Its input rows lie in shared memory image after image, each
// image's rows starting at an even row (the copy engine needs rows aligned to 128 bytes, and boxes may have two rows).
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

// ---- items ----

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
