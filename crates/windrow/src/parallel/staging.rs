//! Copies between the host's tensors and a device, through two pinned buffers in turn: while the
//! copy engine moves one, the processor fills or empties the other.

use super::shard::is_dense;
use crate::gpu::{Event, Gpu, PinnedBuffer, Stream};
use crate::tensor::{check_device, check_tensor};
use crate::{Device, Error, Result, TensorMut, TensorRef, cpu};
use std::sync::Arc;

/// Bytes of each buffer: long enough that starting a copy does not count.
const CHUNK: usize = 16 << 20;
/// Threads that copy to and from pinned memory; a few reach the bus's speed.
const THREADS: usize = 4;

/// A device's two buffers, and the stream of its copies.
pub(super) struct Staging {
    gpu: &'static Gpu,
    stream: Stream,
    slots: [Slot; 2],
}

#[derive(Default)]
struct Slot {
    /// Allocated when first needed.
    buffer: Option<PinnedBuffer>,
    /// The event after the latest copy from or to the buffer.
    done: Option<Arc<Event>>,
}

impl Slot {
    /// The buffer, when no copy is under way.
    fn take(&mut self, gpu: &'static Gpu) -> Result<&mut PinnedBuffer> {
        if let Some(done) = self.done.take() {
            done.synchronize()?;
        }
        if self.buffer.is_none() {
            self.buffer = Some(PinnedBuffer::new(gpu, CHUNK)?);
        }
        Ok(self.buffer.as_mut().expect("made above"))
    }
}

impl Staging {
    pub(super) fn new(gpu: &'static Gpu) -> Result<Self> {
        let stream = Stream::new(gpu.device())?;
        Ok(Staging { gpu, stream, slots: Default::default() })
    }

    /// Copies `x` to the device, after what `after` has been given so far. Returns when `x` may be
    /// changed again; the event is when `y` is complete.
    pub(super) fn upload(
        &mut self,
        x: &TensorRef<'_>,
        y: &mut TensorMut<'_>,
        after: &Stream,
    ) -> Result<Arc<Event>> {
        check_pair(("x", x), ("y", &y.as_ref()), self.gpu)?;
        self.stream.wait(&Event::mark(after)?)?;
        let (bytes, dst) = (x.desc().bytes(), lowest(&y.as_ref()));
        for (i, start) in (0..bytes).step_by(CHUNK).enumerate() {
            let len = CHUNK.min(bytes - start);
            let slot = &mut self.slots[i % 2];
            let buffer = slot.take(self.gpu)?;
            // SAFETY: x is dense, so these bytes are its own.
            let from = unsafe { std::slice::from_raw_parts((lowest(x) + start) as *const u8, len) };
            cpu::copy(THREADS, from, buffer.as_mut_slice());
            // SAFETY: y is dense and of x's size; the buffer is not touched before the event below.
            unsafe { buffer.send((dst + start) as *mut u8, len, &self.stream)? };
            slot.done = Some(Arc::new(Event::mark(&self.stream)?));
        }
        Event::mark(&self.stream).map(Arc::new)
    }

    /// Copies `x` from the device, after what `after` has been given so far; done when it returns.
    pub(super) fn download(
        &mut self,
        x: &TensorRef<'_>,
        y: &mut TensorMut<'_>,
        after: &Stream,
    ) -> Result<()> {
        check_pair(("y", &y.as_ref()), ("x", x), self.gpu)?;
        self.stream.wait(&Event::mark(after)?)?;
        let (bytes, dst, src) = (x.desc().bytes(), lowest(&y.as_ref()), lowest(x));
        let chunks = bytes.div_ceil(CHUNK);
        // Copy i is under way while chunk i - 1 is emptied.
        for i in 0..=chunks {
            if i < chunks {
                let start = i * CHUNK;
                let slot = &mut self.slots[i % 2];
                let buffer = slot.take(self.gpu)?;
                let len = CHUNK.min(bytes - start);
                // SAFETY: x is dense; the buffer is not touched before the event below.
                unsafe { buffer.receive((src + start) as *const u8, len, &self.stream)? };
                slot.done = Some(Arc::new(Event::mark(&self.stream)?));
            }
            if let Some(i) = i.checked_sub(1) {
                let start = i * CHUNK;
                let len = CHUNK.min(bytes - start);
                let buffer = self.slots[i % 2].take(self.gpu)?;
                // SAFETY: y is dense, of x's size and borrowed mutably.
                let to = unsafe { std::slice::from_raw_parts_mut((dst + start) as *mut u8, len) };
                cpu::copy(THREADS, &buffer.as_mut_slice()[..len], to);
            }
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // The buffers must outlive their copies. Nobody can be told of an error here.
        let _ = self.stream.synchronize();
    }
}

fn lowest(x: &TensorRef<'_>) -> usize {
    x.address_range().map_or(0, |(low, _)| low)
}

/// Checks a pair of dense tensors of one type, shape and layout, the first on the host and the second on `gpu`.
fn check_pair(
    host: (&'static str, &TensorRef<'_>),
    device: (&'static str, &TensorRef<'_>),
    gpu: &Gpu,
) -> Result<()> {
    check_device(host.0, host.1.device(), Device::Cpu)?;
    check_device(device.0, device.1.device(), gpu.device())?;
    check_tensor(device.0, device.1.desc(), host.1.dtype(), host.1.shape())?;
    if host.1.layout() != device.1.layout() || !is_dense(host.1) {
        return Err(Error::Strides {
            arg: device.0,
            given: device.1.strides().to_vec(),
            expected: format!("dense, as `{}` {:?}", host.0, host.1.strides()),
        });
    }
    Ok(())
}
