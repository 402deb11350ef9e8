//! The code that non-fused Winograd shares between the convolution and its weight gradient: the division of tiles into
//! chunks, the layout of a stage (U, V or M) in memory, and the transform that reads images.

use crate::conv2d::gpu::shared::matrix::matrix;
use crate::conv2d::gpu::shared::weight_product::OCTET;
use crate::conv2d::gpu::{ALIGNMENT, Divisor, kernel, source, strides};
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::winograd::Rational;
use crate::conv2d::{Problem, Tile};
use crate::gpu::{Gpu, Kernel, KernelSpec, Launch, Matrix, Source, Stream, params};
use crate::{DType, Result, TensorDesc};

static INPUT: Source = source!("winograd_input.cu", "winograd.cuh");
pub(crate) static FILTER_GRAD: Source = source!("winograd_filter_grad.cu", "winograd.cuh");

/// The number of threads of a block, if the configuration does not give it.
pub(crate) const THREADS: usize = 128;
/// Tiles of a chunk are a multiple of this, and padded channels fill such vectors: then every row of
/// a matrix starts at a vector.
const VECTOR_BYTES: usize = 16;
const TILE_MULTIPLE: usize = 8;
/// Chunks of fewer tiles leave a GPU idle. By measurements, this costs more than the cache saves.
const MIN_CHUNK_TILES: usize = 32_768;
/// The largest memory in bytes for the stages of a chunk. The second limit is for images with so many tiles that
/// smaller chunks still fill a GPU: such images take most of a network's memory.
const MAX_STAGE_BYTES: usize = 1 << 30;
const MAX_STAGE_BYTES_OF_LARGE: usize = 1 << 28;
const LARGE_IMAGE_TILES: usize = 16_384;
/// Threads of a launch are counted in 32 bits.
const MAX_THREADS: usize = 1 << 30;

/// The layout of a stage: a matrix for each position of the transformed tile, tiles of a chunk by channels:
/// `[p][channel][tile]` or `[p][tile][channel]`, in the order in which the image has pixels and channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stage {
    pub(crate) dtype: DType,
    pub(crate) channels: usize,
    /// Channels with those that fill the last vector.
    pub(crate) padded: usize,
    /// The number of parts of an element, each with all channels: 1; 3 for f32 split into f16 parts; or 2 that lie in
    /// octets (`winograd.cuh`).
    pub(crate) parts: usize,
    pub(crate) channels_inner: bool,
}

impl Stage {
    /// A stage of a tensor's channels.
    pub(crate) fn of(image: &TensorDesc, dtype: DType) -> Self {
        let channels = image.shape()[1];
        let channels_inner = is_channels_last(&image.layout);
        let padded = channels.next_multiple_of(VECTOR_BYTES / dtype.size());
        Stage { dtype, channels, padded, parts: 1, channels_inner }
    }

    /// Channels of all parts.
    pub(crate) fn rows(&self) -> usize {
        self.parts * self.padded
    }

    fn in_octets(&self) -> bool {
        self.parts == 2
    }

    /// Along positions, tiles and channels, or octets of them, in elements.
    pub(crate) fn strides(&self, tiles: usize) -> [usize; 3] {
        if self.in_octets() {
            return [tiles * self.padded, OCTET, tiles * OCTET];
        }
        let [tile, channel] = if self.channels_inner { [self.rows(), 1] } else { [1, tiles] };
        [tiles * self.rows(), tile, channel]
    }

    pub(crate) fn tile_bytes(&self, positions: usize) -> usize {
        positions * self.rows() * self.dtype.size()
    }

    pub(crate) fn bytes(&self, b: &Blocking) -> usize {
        (b.tiles * self.tile_bytes(b.positions)).next_multiple_of(ALIGNMENT)
    }

    /// The stage as an operand: of tiles by channels if `tiles_first`, otherwise of channels by tiles.
    pub(crate) fn matrix(&self, b: &Blocking, tiles_first: bool) -> Matrix {
        Matrix {
            dtype: self.dtype,
            transposed: self.channels_inner != tiles_first,
            row_stride: if self.channels_inner { self.rows().max(1) } else { b.tiles },
            batch_stride: b.tiles * self.rows(),
            alignment: ALIGNMENT,
        }
    }

    /// The dimension along which neighbouring threads lie.
    pub(crate) fn inner(&self, b: &Blocking, channels: usize) -> Divisor {
        let channels_inner = self.channels_inner && !self.in_octets();
        Divisor::new(if channels_inner { channels.max(1) } else { b.tiles })
    }
}

/// The tiles of a batch, in chunks of which a stage is formed at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocking {
    pub(crate) positions: usize,
    pub(crate) chunks: usize,
    /// The tiles of a chunk.
    pub(crate) tiles: usize,
    tiles_in_row: usize,
    pub(crate) tiles_in_image: usize,
}

impl Blocking {
    /// Chunks of at most `most` and at most `room` tiles, if these are given.
    pub(crate) fn new(
        tile: Tile,
        p: &Problem,
        stages: &[Stage],
        l2_cache: usize,
        most: Option<usize>,
        room: Option<usize>,
    ) -> Self {
        let positions = tile.alpha() * tile.alpha();
        let tiles_in_row = p.ow.div_ceil(tile.m());
        let tiles_in_image = p.oh.div_ceil(tile.m()) * tiles_in_row;
        let all = (p.n * tiles_in_image).max(1);
        let tile_bytes = stages.iter().map(|s| s.tile_bytes(positions)).sum::<usize>().max(1);
        let channels = stages.iter().map(|s| s.padded).max().unwrap_or(0).max(1);
        let is_large = tiles_in_image >= LARGE_IMAGE_TILES;
        let max_bytes = if is_large { MAX_STAGE_BYTES_OF_LARGE } else { MAX_STAGE_BYTES };
        // What one stage writes, the next finds in half of the cache.
        let most = most
            .unwrap_or((l2_cache / 2 / tile_bytes).max(MIN_CHUNK_TILES))
            .min(max_bytes / tile_bytes)
            .min(MAX_THREADS / channels)
            .min(room.unwrap_or(usize::MAX))
            .max(TILE_MULTIPLE);
        let tiles = all.div_ceil(all.div_ceil(most)).next_multiple_of(TILE_MULTIPLE);
        let chunks = all.div_ceil(tiles);
        Blocking { positions, chunks, tiles, tiles_in_row, tiles_in_image }
    }

    /// The blocking with chunks of whole steps of a product.
    pub(crate) fn in_steps(self, rows: usize) -> Self {
        let all = self.tiles * self.chunks;
        let tiles = self.tiles.next_multiple_of(rows);
        Blocking { tiles, chunks: all.div_ceil(tiles), ..self }
    }

    /// The places of a chunk's tiles among `n` images.
    pub(crate) fn tiling(&self, n: usize, chunk: usize) -> Tiling {
        let first = chunk * self.tiles;
        let first_image = first / self.tiles_in_image;
        Tiling {
            images: n as i64 - first_image as i64,
            first_image: first_image as i64,
            first: (first % self.tiles_in_image) as i32,
            per_image: Divisor::new(self.tiles_in_image),
            per_row: Divisor::new(self.tiles_in_row),
        }
    }
}

/// `Tiling` of `winograd.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiling {
    images: i64,
    first_image: i64,
    first: i32,
    per_image: Divisor,
    per_row: Divisor,
}

/// The transform of all tiles of an image tensor into a stage: `T d T^t` for patches `d` that begin
/// `padding` before each tile.
#[derive(Debug)]
pub(crate) struct InputTransform {
    kernel: &'static Kernel,
    strides: [i64; 4],
    stage: Stage,
    size: [usize; 2],
    padding: [usize; 2],
    /// Threads of a block.
    block: usize,
}

params! {
    struct InputParams {
        x: *const u8,
        v: *mut u8,
        x_max: *const u8,
        strides as [x_n, x_c, x_h, x_w]: [i64; 4],
        v_strides as [plane, v_tile, v_channel]: [i64; 3],
        v_part: i64,
        tiling: Tiling,
        inner: Divisor,
        elements: i32,
        c: i32,
        size as [h, w]: [i32; 2],
        pad as [pad_h, pad_w]: [i32; 2],
    }
}

impl InputTransform {
    pub(crate) fn new(
        gpu: &'static Gpu,
        spec: &KernelSpec,
        image: &TensorDesc,
        stage: Stage,
        padding: [usize; 2],
        block: usize,
    ) -> Result<Self> {
        let size = [image.shape()[2], image.shape()[3]];
        let (kernel, strides) = (gpu.kernel(spec)?, strides(image));
        Ok(InputTransform { kernel, strides, stage, size, padding, block })
    }

    /// # Safety
    /// `x` must be `n` images of the tensor. If the stage is split, `x_max` must be their largest magnitudes, or for
    /// octets that of all images. `out` must be [`Stage::bytes`] bytes. All must be on the stream's GPU.
    pub(crate) unsafe fn run(
        &self,
        stream: &Stream,
        x: *const u8,
        x_max: *const u8,
        out: *mut u8,
        b: &Blocking,
        tiling: Tiling,
    ) -> Result<()> {
        let elements = b.tiles * self.stage.padded;
        let v_strides = self.stage.strides(b.tiles).map(|s| s as i64);
        let params = InputParams {
            x,
            v: out,
            x_max,
            strides: self.strides,
            v_strides,
            v_part: match self.stage.in_octets() {
                true => b.positions as i64 * v_strides[0],
                false => self.stage.padded as i64 * v_strides[2],
            },
            tiling,
            inner: self.stage.inner(b, self.stage.padded),
            elements: elements as i32,
            c: self.stage.channels as i32,
            size: self.size.map(|s| s as i32),
            pad: self.padding.map(|s| s as i32),
        };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.kernel.launch(stream, one_thread_each(elements, self.block), &params) }
    }
}

/// The launch with one thread for each element, in blocks of `block` threads.
pub(crate) fn one_thread_each(elements: usize, block: usize) -> Launch {
    Launch::line(elements.div_ceil(block), block)
}

/// The kernel of [`InputTransform`] for a transform of alpha rows and `size` columns.
pub(crate) fn input_kernel<const N: usize>(
    name: &str,
    tile: Tile,
    image: &TensorDesc,
    transform: &[[Rational; N]],
    size: usize,
    block: usize,
) -> KernelSpec {
    staged_kernel(&INPUT, name, tile, image.dtype, block)
        .define("SIZE", size)
        .params::<InputParams>()
        .define("INPUT", matrix(transform, tile.alpha(), size))
        .define("CHANNELS_INNER", i32::from(is_channels_last(&image.layout)))
}

/// A kernel that includes `winograd.cuh`, as `winograd_input_f4_f32`.
pub(crate) fn staged_kernel(
    source: &'static Source,
    name: &str,
    tile: Tile,
    dtype: DType,
    block: usize,
) -> KernelSpec {
    let m = tile.m();
    kernel(source, &format!("winograd_{name}_f{m}"), dtype)
        .define("TILE", m)
        .define("THREADS", block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::gpu::test_specs;

    #[test]
    fn chunks_cover_all_tiles() {
        for spec in test_specs() {
            let stages = [Stage::of(&spec.x, spec.x.dtype), Stage::of(&spec.y, DType::F32)];
            for (tile, l2) in [(Tile::F2, 1 << 20), (Tile::F4, 50 << 20), (Tile::F6, 0)] {
                let mut p = spec.problem().unwrap();
                for (n, most) in [(0, None), (1, None), (7, Some(1)), (64, Some(100)), (3000, None)]
                {
                    p.n = n;
                    let b = Blocking::new(tile, &p, &stages, l2, most, None);
                    let half = Blocking::new(tile, &p, &stages, l2, most, Some(b.tiles / 2));
                    assert!(
                        half.tiles <= (b.tiles / 2).max(1).next_multiple_of(TILE_MULTIPLE),
                        "{half:?}"
                    );
                    assert!(half.tiles * half.chunks >= n * b.tiles_in_image, "{half:?}");
                    assert!(b.tiles * b.chunks >= n * b.tiles_in_image, "{b:?}");
                    assert!(b.tiles * (b.chunks - 1) <= n * b.tiles_in_image, "{b:?}");
                    let bytes: usize = stages.iter().map(|s| s.bytes(&b)).sum();
                    assert!(bytes <= MAX_STAGE_BYTES + 1024, "{b:?}");
                }
            }
        }
    }
}
