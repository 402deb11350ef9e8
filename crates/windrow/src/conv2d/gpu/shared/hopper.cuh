// Hopper's asynchronous instructions, one thin function each: barriers of several arrivals, the tensor
// copy engine, warpgroup matrix products. Names and operands follow the PTX ISA.
#include "copy_engine_sm90.cuh"

// ---- mbarrier ----

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A position in a ring of buffers, each guarded by a `full` and an `empty` barrier.
struct Ring {
    int slot = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance(int slots) {
        if (++slot == slots) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// ---- tensor copy engine ----

struct alignas(128) TensorMap {
    u64 opaque[16];
};

// Copies the box at (c, x, y, n) of a channels-last tensor, with zeros outside the tensor.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, u32 barrier, int c, int x,
                                         int y, int n) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(c), "r"(x),
        "r"(y), "r"(n) : "memory");
}

// Copies channels of the pixels that consecutive outputs read for one tap, with zeros outside the tensor. The first
// output's first tap lies at (x, y, n), and this tap (dx, dy) further on.
__device__ __forceinline__ void copy_pixels(u32 to, const TensorMap* map, u32 barrier, int c, int x, int y, int n,
                                            u16 dx, u16 dy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to), "l"(map), "r"(barrier), "r"(c), "r"(x),
        "r"(y), "r"(n), "h"(dx), "h"(dy) : "memory");
}

// ---- wgmma ----

// The terms of a product: 32 bytes of them. Only operands of 16 bits may have columns side by side.
#if TF32
#define MMA_DEPTH "k8"
#define MMA_TURNED(operands) ""
#else
#define MMA_DEPTH "k16"
#define MMA_TURNED(operands) ", " operands ", " operands
#endif

template <int REGISTERS> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// But for the products that were committed last.
__device__ __forceinline__ void wgmma_wait_but_one() {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// Descriptor of a matrix in shared memory made of 8 x 8 blocks of 128 contiguous bytes; `k_step`
// bytes lie between blocks that follow each other along k, `n_step` along n.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, int k_step, int n_step) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(k_step >> 4) << 16 |
           static_cast<u64>(n_step >> 4) << 32;
}

// d[64, 64] = a[64, 16] b[16, 64] + (accumulate ? d : 0); a in registers, b in shared memory.
// The 32 registers of a thread: d[4 j + 2 t + e] is row 16 warp + lane / 4 + 8 t, column
// 8 j + 2 (lane % 4) + e. Those of a: a[t] and a[2 + t] are the same row, columns
// 2 (lane % 4) + {0, 1} and 8 more.
__device__ __forceinline__ void wgmma_m64n64k16(float (&d)[32], const u32 (&a)[4], u64 b,
                                                int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64" MMA_DEPTH ".f32." MMA_TYPE "." MMA_TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),
          "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// The same with 128 columns; registers d[4 j + 2 t + e] as above.
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], const u32 (&a)[4], u64 b,
                                                 int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128" MMA_DEPTH ".f32." MMA_TYPE "." MMA_TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
          "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
          "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
          "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
          "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
          "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma(float (&d)[32], const u32 (&a)[4], u64 b, int accumulate) {
    wgmma_m64n64k16(d, a, b, accumulate);
}

__device__ __forceinline__ void wgmma(float (&d)[64], const u32 (&a)[4], u64 b, int accumulate) {
    wgmma_m64n128k16(d, a, b, accumulate);
}

// ---- wgmma, both operands in shared memory ----

// Descriptor of a matrix in rows of 128 or 64 bytes of shared memory, swizzled: 16 bytes i of row r lie at i ^ r % 8, or at
// i ^ r / 2 % 4. Rows are counted from a multiple of eight rows; the matrix may begin at any row, and `address` may be
// 32 bytes further on, or 64, or 96.
template <int ROW_BYTES> __device__ __forceinline__ u64 swizzled_descriptor(u32 address) {
    constexpr u64 SWIZZLE = ROW_BYTES == 128 ? 1 : 2, EIGHT_ROWS = 8 * ROW_BYTES;
    return static_cast<u64>((address & 0x3ffff) >> 4) | 1ull << 16 | EIGHT_ROWS >> 4 << 32 | SWIZZLE << 62;
}

// The registers of sums, as the text of an instruction names them and as its operands.
#define NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_48 NAMES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_64 NAMES_48 ", " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_96 NAMES_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_128 NAMES_96 ", " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define REGISTERS_8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define REGISTERS_16(i) REGISTERS_8(i), REGISTERS_8(i + 8)
#define REGISTERS_32 REGISTERS_16(0), REGISTERS_16(16)
#define REGISTERS_48 REGISTERS_32, REGISTERS_16(32)
#define REGISTERS_64 REGISTERS_48, REGISTERS_16(48)
#define REGISTERS_96 REGISTERS_64, REGISTERS_16(64), REGISTERS_16(80)
#define REGISTERS_128 REGISTERS_96, REGISTERS_16(96), REGISTERS_16(112)

// As the products above, for N columns and N / 2 sums, behind which the further operands are numbered; with COLUMNS
// d[64, N] = a^T b, for a[16, 64] and b[16, N] with columns side by side.
#define WGMMA_SHARED(N, SUMS, A, B, ACCUMULATE, TURNED) \
    template <int COLUMNS> \
    __device__ __forceinline__ void wgmma_shared(float (&d)[SUMS], u64 a, u64 b, int accumulate) { \
        asm volatile( \
            "{\n" \
            ".reg .pred p;\n" \
            "setp.ne.b32 p, " ACCUMULATE ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" N MMA_DEPTH ".f32." MMA_TYPE "." MMA_TYPE " " \
            "{" NAMES_##SUMS "}, " A ", " B ", p, 1, 1" MMA_TURNED(TURNED) ";\n" \
            "}" \
            : REGISTERS_##SUMS \
            : "l"(a), "l"(b), "r"(accumulate), "n"(COLUMNS)); \
    }
WGMMA_SHARED("64", 32, "%32", "%33", "%34", "%35")
WGMMA_SHARED("96", 48, "%48", "%49", "%50", "%51")
WGMMA_SHARED("128", 64, "%64", "%65", "%66", "%67")
WGMMA_SHARED("192", 96, "%96", "%97", "%98", "%99")
WGMMA_SHARED("256", 128, "%128", "%129", "%130", "%131")

template <int N> __device__ __forceinline__ void wgmma(float (&d)[N], u64 a, u64 b, int accumulate) {
    wgmma_shared<0>(d, a, b, accumulate);
}

template <int N>
__device__ __forceinline__ void wgmma_transposed(float (&d)[N], u64 a, u64 b, int accumulate) {
    wgmma_shared<1>(d, a, b, accumulate);
}
