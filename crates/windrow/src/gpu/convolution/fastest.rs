//! The choice of the fastest of cuDNN's kernels for a convolution, by measurement.

use super::{Convolution, ConvolutionSpec};
use crate::gpu::kernel::OnceEach;
use crate::gpu::{DeviceBuffer, Event, Gpu, Stream};
use crate::{Device, Result};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// The number of kernels that are timed. On the measured layers (no record is kept) the heuristic's first choice took
/// up to 17 % longer than the best of them.
const TRIED: usize = 8;
/// The number of timings of each kernel. They are interleaved, and the shortest counts.
const ROUNDS: usize = 5;
/// The approximate duration of a timing.
const MILLISECONDS: f32 = 0.5;
/// A kernel that takes at least this many times as long as the best is not timed again.
const HOPELESS: f32 = 1.2;

/// The fastest of the forward kernels that `find` returns, whose argument is their maximum number. They are timed when
/// a spec is first seen in the process; later calls return the same kernel. Threads that need the same spec wait for
/// the result, and one thread measures at a time.
///
/// # Errors
/// The errors of `find`. A kernel that fails while it is timed is skipped. If there is not enough memory for timing,
/// the first kernel is returned.
pub(super) fn of(
    gpu: &'static Gpu,
    spec: &ConvolutionSpec,
    find: impl Fn(usize) -> Result<Vec<Box<dyn Convolution>>>,
) -> Result<Box<dyn Convolution>> {
    static FOUND: LazyLock<OnceEach<(Device, ConvolutionSpec), usize>> =
        LazyLock::new(OnceEach::default);
    static MEASURING: Mutex<()> = Mutex::new(());
    let mut tried = None;
    let number = FOUND.get_or_make(&(gpu.device(), *spec), || {
        let kernels = tried.insert(find(TRIED)?);
        // The kernels of another measurement on the device would be in the times.
        let _alone = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
        let measured = gpu.despite_captures(|| measure(gpu, spec, kernels));
        Ok(measured.unwrap_or_else(|error| {
            tracing::debug!(%error, "cuDNN's kernels are not measured");
            0
        }))
    })?;
    let mut kernels = match tried {
        Some(kernels) => kernels,
        None => find(number + 1)?,
    };
    let number = number.min(kernels.len() - 1);
    Ok(kernels.swap_remove(number))
}

/// The index of the fastest kernel.
fn measure(
    gpu: &'static Gpu,
    spec: &ConvolutionSpec,
    kernels: &[Box<dyn Convolution>],
) -> Result<usize> {
    if kernels.len() == 1 {
        return Ok(0);
    }
    let stream = Arc::new(Stream::new(gpu.device())?);
    let workspace = kernels.iter().map(|kernel| kernel.workspace_bytes()).max().unwrap_or(0);
    let mut buffers = [spec.w, spec.x, spec.y]
        .map(|shape| shape.iter().product::<usize>() * spec.dtype.size())
        .into_iter()
        .chain([workspace])
        .map(|bytes| DeviceBuffer::new(&stream, bytes))
        .collect::<Result<Vec<_>>>()?;
    for buffer in &mut buffers {
        // SAFETY: the buffer was allocated on this stream.
        unsafe { stream.zero(buffer.as_mut_ptr(), buffer.len())? };
    }
    let addresses: Vec<_> = buffers.iter_mut().map(DeviceBuffer::as_mut_ptr).collect();
    let tensors = [addresses[0], addresses[1], addresses[2]];
    // Milliseconds of one of `runs` runs.
    let time = |kernel: &dyn Convolution, runs: usize| -> Result<f32> {
        let start = Event::record(&stream)?;
        for _ in 0..runs {
            // SAFETY: the buffers are those of the spec, and live until the stream is waited for.
            gpu.call(|_| unsafe { kernel.run(tensors, addresses[3], stream.as_raw()) })?;
        }
        Ok(Event::record(&stream)?.milliseconds_since(&start)? / runs as f32)
    };
    // The first run loads a kernel.
    let first = |kernel: &dyn Convolution| {
        time(kernel, 1).and_then(|_| time(kernel, 2)).unwrap_or(f32::INFINITY)
    };
    let mut times: Vec<f32> = kernels.iter().map(|kernel| first(&**kernel)).collect();
    for _ in 0..ROUNDS {
        let best = times.iter().copied().fold(f32::INFINITY, f32::min);
        for (kernel, shortest) in kernels.iter().zip(&mut times) {
            if *shortest < HOPELESS * best {
                let runs = (MILLISECONDS / best).clamp(2.0, 20.0) as usize;
                *shortest = shortest.min(time(&**kernel, runs)?);
            }
        }
    }
    stream.synchronize()?;
    tracing::debug!(?times, "cuDNN's kernels in milliseconds");
    Ok((0..times.len()).min_by(|&a, &b| times[a].total_cmp(&times[b])).unwrap_or(0))
}
