// Fused Winograd convolution for sm_90a: input transform, products and output transform in one kernel; the
// transformed tensors never reach device memory.
//
// F(3, 3) runs along the width, and the filter's rows are summed directly. One Winograd tile is 1 x 3 outputs. It has 5
// positions, and 15 products per input channel instead of the direct sum's 27. For each position
//
//     M[tile, k] = sum over rows r and channels c of V_r[tile, c] U_r[c, k],
//
// a product of matrices with tiles on the rows. A thread computes V in registers from pixels in shared memory: exactly
// the elements of operand A that the tensor core reads from this thread (hopper.cuh). So V is never stored. All
// positions of a tile stay in one thread, so the output transform is arithmetic in its registers.
//
// A block has two consumer warpgroups, which multiply 64 tiles by 64 output channels each, and a producer warpgroup
// that keeps two rings full: input boxes (per consumer) and transformed filter steps (shared by both).
//
// With FRAMES, images are the frames of a video. The sums run over the frames of the filter as well, one after the other:
// only the producer knows which frame of x it brings.
//
// Constants: ELEMENT_F16, ELEMENT_BF16 or ELEMENT_F32; PRODUCTS 1 or 3 (operands split in two f16 parts); EPILOGUE;
// RESIDUAL; CHANNELS_LAST_OUT 0 or 1; PAIRS_X, PIXEL_PITCH, PAIR_BITS (see `pair_of`); the transforms INPUT_INNER,
// INPUT_POINT, INPUT_ROW, OUTPUT; INPUT_STAGES; for f32 INPUT_EXPONENT and FILTER_EXPONENT.

#include "winograd_row_input.cuh"
#include "winograd_row_output.cuh"

// ---- producer ----

// A ring's `empty` barriers lie this far after the `full` ones.
constexpr int X_EMPTY = 2 * 8 * INPUT_STAGES;

// How images of x follow each other: those of a video are its frames, which each tap of the filter reads further on.
struct Reads {
    int first;            // image of x that the first tap of an image of y reads
    int taps, steps;      // frames of the filter, and steps of each
    int of_tap, of_image; // distances between images of x

    __device__ __forceinline__ Reads(const Params& p, int image) {
#if FRAMES
        first = p.frames.number(image, 0);
        taps = p.frames.kt, steps = p.frame_steps;
        of_tap = p.frames.dilation, of_image = p.frames.stride;
#else
        first = image;
        taps = 1, steps = p.steps;
        of_tap = 0, of_image = 1;
#endif
    }
};

// The copy of a box of an image of x or, before the first frame of a video, of what is read in its place.
__device__ __forceinline__ void copy_input(const Params& p, u32 to, u32 barrier, int c, int x, int y, int image) {
#if FRAMES
    const bool is_initial = image < 0 && p.frames.initial_count > 0;
    const int frame = is_initial ? image + p.frames.initial_count : p.frames.repeats ? max(image, 0) : image;
    copy_box(to, is_initial ? &p.initial : &p.x, barrier, c, x, y, frame);
#else
    copy_box(to, &p.x, barrier, c, x, y, image);
#endif
}

// Brings the input of a unit, for one tap and the channels of a stage.
__device__ __forceinline__ void produce_stage(const Params& p, const Unit& unit, const Reads& reads, int image, int step,
                                              u32 to, u32 bytes, u32 box_bytes, u32 barrier) {
    const u32 end = to + bytes;
    int row = unit.row;
#pragma unroll 1
    do {
        copy_input(p, to, barrier, step * STEP_C, unit.x0 - p.pad_w, row - p.pad_h, image);
        to += box_bytes;
        row += p.box_rows;
        if (row >= static_cast<int>(p.image_rows.value) + TAPS_H - 1) {
            row = 0;
            image += reads.of_image;
        }
    } while (to != end);
}

__device__ __forceinline__ void produce_input(const Params& p, int consumer, u32 stages, u32 full) {
    Ring ring;
    for (int item = blockIdx.x; item < Item::count(p); item += gridDim.x) {
        const Unit unit(p, Item(p, item, consumer).unit);
        const Reads reads(p, unit.image);
        const u32 box_bytes = p.box_rows * PIXEL_PITCH * PIXEL_BYTES, bytes = unit.boxes(p) * box_bytes;
        int image = reads.first;
#pragma unroll 1
        for (int tap = 0; tap < reads.taps; tap++) {
#pragma unroll 1
            for (int step = 0; step < reads.steps; step += STAGE_STEPS) {
                const u32 barrier = full + 8 * ring.slot;
                barrier_wait(barrier + X_EMPTY, ring.parity ^ 1);
                barrier_expect(barrier, bytes);
                produce_stage(p, unit, reads, image, step, stages + ring.slot * p.stage_bytes, bytes, box_bytes, barrier);
                ring.advance(INPUT_STAGES);
            }
            image += reads.of_tap;
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
            copy_in(stages + ring.slot * U_BYTES, u, U_BYTES, full + 8 * ring.slot);
            u += U_BYTES;
            ring.advance(p.u_stages);
        }
        if (p.u_resident) return;
    }
}

// ---- consumer ----

// The second consumer begins a step later, so that it multiplies while the first one stores outputs. With three
// products this is faster. With one, the consumers wait for each other at the filter's ring.
constexpr bool STAGGERED = PRODUCTS == 3;

__device__ __forceinline__ u32 x_max_of(const Params& p, int image) { return p.x_max[image < p.n ? image : p.n - 1]; }

__device__ __forceinline__ void consume(const Params& p, int consumer, int warp, int lane, u32 stages, u32 x_full,
                                        u32 x_empty, u32 u_stages, u32 u_full, u32 u_empty, u32 begun,
                                        Channels& channels, ElementPair* staging) {
    const int q = lane & 3, pair = pair_of(warp, lane >> 2);
    float acc[ALPHA][32];
    Ring x_ring, u_ring;
    int previous = -1;  // filter slot of the last product
    int k_loaded = -1;  // block whose `channels` are loaded
    // Frees the filter slot of the last product, once that product is done.
    const auto release = [&] {
        if (previous >= 0 && !p.u_resident && lane == 0) barrier_arrive(u_empty + 8 * previous);
    };

    if (STAGGERED && consumer == 1) barrier_wait(begun, 0);
    for (int item = blockIdx.x; item < Item::count(p); item += gridDim.x) {
        const Item work(p, item, consumer);
        if (work.k_block != k_loaded) {
            k_loaded = work.k_block;
            channels.load(p, k_loaded * BLOCK_K, lane);
        }
        Tiles tiles(p, Unit(p, work.unit), pair);
        if (RESIDUAL)
            prefetch_residual(p, Place(p, work, Unit(p, work.unit), tiles), work.k_block * BLOCK_K, q);
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
                    // Low-order terms first. A product that adds to the same sums as the last one would wait for it.
#pragma unroll
                    for (int n = 0; n < PRODUCTS; n++) {
#pragma unroll
                        for (int i = 0; i < ALPHA; i++) {
                            const int of_v = n == 0 ? PARTS - 1 : 0, of_u = n == 1 ? 1 : 0;
                            const u64 part = u + ((i * PARTS + of_u) * PART_BYTES >> 4);
                            wgmma_m64n64k16(acc[i], a[of_v][i], part, n == 0 ? accumulate : 1);
                        }
                    }
                    wgmma_commit();
                    release();
                    previous = u_ring.slot;
                    u_ring.advance(p.u_stages);
                    if (STAGGERED && tap == TAPS_H - 1 && step + s == 0 && item == blockIdx.x && consumer == 0 && lane == 0)
                        barrier_arrive(begun);
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

        // The places of the tiles are computed again rather than kept in registers.
        int same_item = item;
        asm volatile("" : "+r"(same_item));
        const Item same(p, same_item, consumer);
        const Unit unit(p, same.unit);
        tiles = Tiles(p, unit, pair);
        const int k0 = same.k_block * BLOCK_K;
        const Place place(p, same, unit, tiles);
#ifdef ELEMENT_F32
        const float inverse =
            power_of_two_scale(x_max_of(p, tiles.image), INPUT_EXPONENT, true) * power_of_two(INPUT_EXPONENT);
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
    // Input stages of both consumers come first, because the swizzle needs them aligned to 512 bytes.
    const u32 x_stages = shared_address(shared);
    const u32 u_stages = x_stages + 2 * INPUT_STAGES * p.stage_bytes;
    const u32 x_full = u_stages + p.u_stages * U_BYTES, x_empty = x_full + X_EMPTY;
    const u32 u_full = x_empty + 16 * INPUT_STAGES, u_empty = u_full + 8 * p.u_stages;
    // Then, for each consumer warp, its output channels and (strided output) its staging buffer.
    const u32 begun = u_empty + 8 * p.u_stages; // the first consumer has begun
    unsigned char* const scratch = shared + ((begun + (STAGGERED ? 8 : 0) - x_stages + 15) & ~15);

    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * INPUT_STAGES; i++) {
            barrier_init(x_full + 8 * i, 1);
            barrier_init(x_empty + 8 * i, 4);
        }
        for (int i = 0; i < p.u_stages; i++) {
            barrier_init(u_full + 8 * i, 1);
            barrier_init(u_empty + 8 * i, CONSUMER_WARPS);
        }
        if (STAGGERED) barrier_init(begun, 4);
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
                x_empty + offset, u_stages, u_full, u_empty, begun, *channels, staging);
    }
}
