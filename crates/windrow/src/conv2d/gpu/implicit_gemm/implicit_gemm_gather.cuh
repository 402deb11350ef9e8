// The gathering of implicit_gemm.cu and implicit_gemm_single.cu: terms of x go to shared memory, with zeros outside the
// image and the sum.
//
// GATHER CHANNELS: a stage is [pixel][term], rows of chunks of 16 bytes. f32: the first and second half of odd rows are
// swapped. f16/bf16: chunk i of row r is at i ^ r % 8, which is the swizzle of 128 bytes. Otherwise it is
// [term][pixel], pixel i of term t at i ^ (t / 4 % 4 * 8). So the consumers' loads have no bank conflicts.

#include "implicit_gemm.cuh"

// Copies an element, or writes zero.
__device__ __forceinline__ void copy_element(u32 to, const Element* from, int exists) {
    asm volatile(
        "{\n"
        ".reg .pred ignored;\n"
        "setp.eq.b32 ignored, %2, 0;\n"
        "cp.async.ca.shared.global [%0], [%1], 4, ignored;\n"
        "}" ::"r"(to), "l"(from), "r"(exists) : "memory");
}

// As above, 16 bytes.
__device__ __forceinline__ void copy_vector(u32 to, const Element* from, int exists) {
    asm volatile(
        "{\n"
        ".reg .pred ignored;\n"
        "setp.eq.b32 ignored, %2, 0;\n"
        "cp.async.cg.shared.global [%0], [%1], 16, ignored;\n"
        "}" ::"r"(to), "l"(from), "r"(exists) : "memory");
}

// The thread's arrival, once its copies have come.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void meet_producers() {
    asm volatile("bar.sync 1, %0;" ::"n"(PRODUCERS) : "memory");
}

// The place at which the taps of an output begin.
struct Origin {
    int offset; // in x, or a frame of it, of the first of a unit's channels, which are `channels` further on
    int y, x;
    bool exists;

    __device__ __forceinline__ Origin(const Params& p, int pixel, int channels) {
        exists = has_pixel(p, pixel);
        const Pixel at(p, exists ? pixel : 0);
        y = at.row * p.stride_h - p.pad_h;
        x = at.column * p.stride_w - p.pad_w;
        offset = channels + static_cast<int>((FRAMES ? 0 : at.image * p.x_n) + y * p.x_h + x * p.x_w);
    }
    // A row that no tap brings back to the image stands for a pixel that does not exist.
    __device__ __forceinline__ int packed() const { return exists ? y << 16 | (x & 0xffff) : NOWHERE; }
    static constexpr int NOWHERE = -(1 << 30);
};

// True if the tap so far from an origin exists.
__device__ __forceinline__ bool inside(const Params& p, int origin, int dy, int dx) {
    if (!PADDED) return origin != Origin::NOWHERE;
    const int y = (origin >> 16) + dy, x = static_cast<short>(origin) + dx;
    return static_cast<u32>(y) < static_cast<u32>(p.h) && static_cast<u32>(x) < static_cast<u32>(p.w);
}

#if GATHER == CHANNELS

struct Gather {
    static constexpr int CHUNKS = ROW_BYTES / 16, ROWS = PRODUCERS / CHUNKS; // of a row, that are copied together
    int2* rows; // of the tile: offset, y << 16 | x
    int thread;
    int dy, dx, offset; // of the step's term from an origin
    bool exists;
    int image = 0; // of the tile, with FRAMES
    const Element* from = nullptr; // what the step's term reads, with FRAMES

    __device__ __forceinline__ Gather(int2* rows, int thread) : rows(rows), thread(thread) {}

    __device__ __forceinline__ void begin(const Params& p, int pixel0, int channels) {
        meet_producers();
#pragma unroll
        for (int row = thread; row < BLOCK_M; row += PRODUCERS) {
            const Origin origin(p, pixel0 + pixel_of(row), channels);
            rows[row] = make_int2(origin.offset, origin.packed());
        }
        if (FRAMES) image = p.image_pixels.divide(pixel0);
        meet_producers();
    }

    __device__ __forceinline__ void aim(const Params& p, int step) {
        const Term term(p, step * STEP_DEPTH + thread % CHUNKS * (STEP_DEPTH / CHUNKS));
        const Source source(p, image, term.r);
        if (FRAMES) from = source.x;
        exists = term.exists(p) && source.exists;
        dy = row_of(p, term.r) * p.dilation_h;
        dx = term.s * p.dilation_w;
        offset = static_cast<int>(dy * p.x_h + dx * p.x_w) + term.c;
    }

    __device__ __forceinline__ void step(const Params& p, int, u32 stage) {
        constexpr int BATCH = 8;
        const int chunk = thread % CHUNKS, row0 = thread / CHUNKS;
#pragma unroll
        for (int i0 = 0; i0 < BLOCK_M / ROWS; i0 += BATCH) {
            // At once: a copy is a barrier to the compiler, and each would wait for its own load.
            int2 origins[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) origins[i] = rows[row0 + ROWS * (i0 + i)];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int row = row0 + ROWS * (i0 + i), swizzle = IS_F32 ? (row & 1) << 2 : row & 7;
                copy_vector(stage + row * ROW_BYTES + ((chunk ^ swizzle) << 4),
                            (FRAMES ? from : p.x) + (origins[i].x + offset),
                            exists && inside(p, origins[i].y, dy, dx));
            }
        }
    }
};

#elif GATHER == PIXELS

struct Gather {
    int thread, offset;
    bool exists;
    int image = 0; // of the tile, with FRAMES

    __device__ __forceinline__ Gather(int2*, int thread) : thread(thread) {}

    __device__ __forceinline__ void aim(const Params&, int) {}

    __device__ __forceinline__ void begin(const Params& p, int pixel0, int channels) {
        if (FRAMES) image = p.image_pixels.divide(pixel0);
        const Origin origin(p, pixel0 + thread % 32 * 4, channels);
        offset = origin.offset;
        exists = origin.exists;
    }

    __device__ __forceinline__ void step(const Params& p, int step, u32 stage) {
        const int term0 = thread / 32 * 16, lane = thread % 32;
#if FRAMES // whose channels are whole sixteens
        const Term term(p, step * STEP_DEPTH + term0);
        const Source source(p, image, term.r);
        const int c = term.exists(p) && source.exists ? term.c : static_cast<int>(p.c.value);
#else
        const Source source(p, 0, 0);
        const int c = step * STEP_DEPTH + term0;
#endif
        const float* from = source.x + (offset + c * source.x_c);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            copy_vector(stage + (term0 + i) * (BLOCK_M * 4) + ((lane * 4 ^ i / 4 * 8) << 2), from, exists && c + i < static_cast<int>(p.c.value));
            from += source.x_c;
        }
    }
};

#elif GATHER == ANY

struct Gather {
    static constexpr int COUNT = BLOCK_M / 32; // pixels of a thread
    int thread;
    int offset[COUNT], place[COUNT]; // of their origins: y << 16 | x
    const float* at[COUNT];          // of a tap
    int exists[COUNT];               // 0 where the tap lies outside
    int image = 0;                   // of the tile, with FRAMES
    int x_c = 0;                     // of the tap

    __device__ __forceinline__ Gather(int2*, int thread) : thread(thread) {}

    __device__ __forceinline__ void begin(const Params& p, int pixel0, int channels) {
        if (FRAMES) image = p.image_pixels.divide(pixel0);
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const Origin origin(p, pixel0 + thread % 32 + 32 * j, channels);
            offset[j] = origin.offset;
            place[j] = origin.packed();
        }
    }

    __device__ __forceinline__ void aim(const Params&, int) {}

    __device__ __forceinline__ void enter(const Params& p, const Term& term) {
        const Source source(p, image, term.r);
        x_c = static_cast<int>(source.x_c);
        const int dy = row_of(p, term.r) * p.dilation_h, dx = term.s * p.dilation_w;
        const int tap = static_cast<int>(dy * p.x_h + dx * p.x_w);
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            at[j] = source.x + (offset[j] + tap);
            exists[j] = term.exists(p) && source.exists && inside(p, place[j], dy, dx);
        }
    }

    __device__ __forceinline__ void step(const Params& p, int step, u32 stage) {
        const int term0 = thread / 32 * 16, lane = thread % 32;
        Term term(p, step * STEP_DEPTH + term0);
        enter(p, term);
        int channel = term.c * x_c;
        u32 to = stage + term0 * (BLOCK_M * 4);
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            const u32 first = to + ((lane ^ i * 8) << 2);
#pragma unroll
            for (int l = 0; l < 4; l++) {
#pragma unroll
                for (int j = 0; j < COUNT; j++) copy_element(first + (l * BLOCK_M + 32 * j) * 4, at[j] + channel, exists[j]);
                channel += x_c;
                if (++term.c == static_cast<int>(p.c.value)) {
                    term.next_tap(p);
                    enter(p, term);
                    channel = 0;
                }
            }
            to += 4 * BLOCK_M * 4;
        }
    }
};

#endif

#if GATHER == MAP

// What an image of y reads through a row of the filter, as the copy engine knows it. Channels from `beyond` on are zeros.
struct Taken {
    const TensorMap* map;
    int image, beyond;
    bool exists;

    __device__ __forceinline__ Taken(const Params& p, int of_y, int r) {
#if FRAMES
        const int number = p.frames.number(of_y, p.frame_r.divide(r));
        const bool is_initial = number < 0 && p.frames.initial_count > 0;
        map = is_initial ? &p.initial_map : &p.map;
        exists = number < p.frames.t && (number >= 0 || is_initial || p.frames.repeats);
        image = is_initial ? number + p.frames.initial_count : exists ? max(number, 0) : 0;
        beyond = p.all_c;
#else
        map = &p.map;
        image = of_y;
        beyond = 0;
        exists = true;
#endif
    }
};

// One thread starts all copies.
__device__ __forceinline__ void produce(const Params& p, int thread, int2*, u32 stages, u32 full, u32 empty) {
    if (thread == 0) {
        Ring ring;
        const int rank = rank_in_cluster(), first = first_step(p, rank), last = first_step(p, rank + 1);
        for (int tile = blockIdx.x / SPLIT; tile < p.tiles; tile += gridDim.x / SPLIT) {
            const int m_block = p.k_blocks.divide(tile), k_block = tile - m_block * static_cast<int>(p.k_blocks.value);
            const Pixel at(p, m_block * BLOCK_M);
            const int y = at.row * p.stride_h - p.pad_h, x = at.column * p.stride_w - p.pad_w;
            const int channel = Columns(p, k_block).unit * static_cast<int>(p.c.value);
            Term term(p, first * STEP_DEPTH);
#pragma unroll 1
            for (int step = first; step < last; step++) {
                const u32 stage = stages + ring.slot * STAGE_BYTES, barrier = full + 8 * ring.slot;
                barrier_wait(empty + 8 * ring.slot, ring.parity ^ 1);
                barrier_expect(barrier, STAGE_BYTES);
                const Taken taken(p, at.image, term.r);
                copy_pixels(stage, taken.map, barrier, taken.exists ? channel + term.c : taken.beyond, x, y, taken.image,
                            term.s * p.dilation_w, row_of(p, term.r) * p.dilation_h);
                copy_in(stage + X_BYTES, p.filter + (static_cast<i64>(k_block) * p.steps + step) * W_BYTES, W_BYTES, barrier);
                term.c += STEP_CHANNELS;
                if (term.c == static_cast<int>(p.c.value)) STRIP ? term.next_row() : term.next_tap(p);
                ring.advance(STAGES);
            }
        }
    }
    __syncwarp();
}

#else

__device__ __forceinline__ void produce(const Params& p, int thread, int2* rows, u32 stages, u32 full, u32 empty) {
    Gather gather(rows, thread);
    Ring ring;
    const int rank = rank_in_cluster(), first = first_step(p, rank), last = first_step(p, rank + 1);
    for (int tile = blockIdx.x / SPLIT; tile < p.tiles; tile += gridDim.x / SPLIT) {
        const int m_block = p.k_blocks.divide(tile), k_block = tile - m_block * static_cast<int>(p.k_blocks.value);
        const Columns columns(p, k_block);
        gather.begin(p, m_block * BLOCK_M, static_cast<int>(columns.unit * static_cast<int>(p.c.value) * p.x_c));
#pragma unroll 1
        for (int step = first; step < last; step++) {
            const u32 stage = stages + ring.slot * STAGE_BYTES, barrier = full + 8 * ring.slot;
            gather.aim(p, step);
            barrier_wait(empty + 8 * ring.slot, ring.parity ^ 1);
            if (thread == 0) {
                barrier_expect(barrier, W_BYTES);
                copy_in(stage + X_BYTES, p.filter + (static_cast<i64>(k_block) * p.steps + step) * W_BYTES, W_BYTES, barrier);
            }
            gather.step(p, step, stage);
            arrive_after_copies(barrier);
            ring.advance(STAGES);
        }
#if SPLIT > 1 && defined(ELEMENT_F32) // which is split here
        // A stage without terms, in which the blocks of the cluster find each other's sums.
        barrier_wait(empty + 8 * ring.slot, ring.parity ^ 1);
        barrier_arrive(full + 8 * ring.slot);
        if (thread == 0) barrier_arrive(full + 8 * ring.slot);
        ring.advance(STAGES);
#endif
    }
}

#endif
