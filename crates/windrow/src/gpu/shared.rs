//! Device memory that work on several streams and in graphs may use.

use super::capture::is_releasing;
use super::memory;
use super::{Event, Gpu, Stream};
use crate::Result;
use crate::try_once_lock::TryOnceLock;
use std::sync::{Arc, Mutex, PoisonError};

/// Device memory that records its last use on each stream. It can be dropped at any time and on any thread, without
/// waiting, even after the streams are gone.
#[derive(Debug)]
pub(crate) struct SharedBuffer {
    ptr: *mut u8,
    len: usize,
    gpu: &'static Gpu,
    /// The end of the last use on each stream, by the stream's number.
    uses: Mutex<Vec<(u64, Event)>>,
}

/// Memory that has no owner any more, and the stream that frees it.
#[derive(Debug, Default)]
pub(super) struct Released {
    blocks: Mutex<Vec<Block>>,
    stream: TryOnceLock<Stream>,
}

#[derive(Debug)]
struct Block {
    ptr: *mut u8,
    uses: Vec<(u64, Event)>,
}

// SAFETY: what it points to is plain bytes, which only the device reads and writes.
unsafe impl Send for Block {}

// SAFETY: it owns plain bytes, which only the device reads and writes.
unsafe impl Send for SharedBuffer {}
// SAFETY: what changes is behind a mutex.
unsafe impl Sync for SharedBuffer {}

impl SharedBuffer {
    /// `len` bytes, at least one, aligned to 256, with arbitrary contents. They are for later work on `stream`, and on
    /// streams that wait for `stream`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::Backend`](crate::Error::Backend).
    pub(crate) fn new(stream: &Stream, len: usize) -> Result<Self> {
        let buffer = Self::allocate(stream, len)?;
        // Whoever frees it waits for the allocation at least.
        buffer.mark_use(stream)?;
        Ok(buffer)
    }

    /// A buffer like that of [`SharedBuffer::new`], for work on any stream, also while this thread captures one. The
    /// memory is allocated now, not when a graph runs, and a graph has to [retain](super::capture::Capture::retain) it.
    /// Waits for the allocation.
    ///
    /// # Errors
    /// As [`SharedBuffer::new`].
    pub(crate) fn apart(gpu: &'static Gpu, len: usize) -> Result<Self> {
        gpu.despite_captures(|| {
            let stream = Stream::apart(gpu)?;
            let buffer = Self::allocate(&stream, len)?;
            stream.synchronize()?;
            Ok(buffer)
        })
    }

    fn allocate(stream: &Stream, len: usize) -> Result<Self> {
        let gpu = stream.gpu();
        gpu.free_released();
        let ptr = memory::allocate(stream, len)?;
        Ok(SharedBuffer { ptr, len, gpu, uses: Mutex::default() })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn gpu(&self) -> &'static Gpu {
        self.gpu
    }

    /// Its address. Writers and readers must be ordered by streams and events.
    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Records that the work enqueued on `stream` so far uses the memory. If the stream is captured, the graph keeps
    /// the memory.
    ///
    /// # Errors
    /// [`Error::Backend`](crate::Error::Backend).
    pub(crate) fn used_on(self: &Arc<Self>, stream: &Stream) -> Result<()> {
        match stream.capture_under_way()? {
            Some(capture) => capture.retain(self.clone()),
            None => self.mark_use(stream),
        }
    }

    /// Records like [`SharedBuffer::used_on`], for a stream that is not captured.
    pub(crate) fn mark_use(&self, stream: &Stream) -> Result<()> {
        let id = stream.id()?;
        // Taken out while it is recorded: the driver may wait for room in the stream's queue.
        let known = {
            let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
            uses.iter().position(|(of, _)| *of == id).map(|i| uses.swap_remove(i).1)
        };
        let event = match known {
            Some(event) => event.mark_again(stream).map(|()| event)?,
            None => Event::mark(stream)?,
        };
        self.uses.lock().unwrap_or_else(PoisonError::into_inner).push((id, event));
        Ok(())
    }
}

impl Drop for SharedBuffer {
    fn drop(&mut self) {
        let uses = std::mem::take(self.uses.get_mut().unwrap_or_else(PoisonError::into_inner));
        let block = Block { ptr: self.ptr, uses };
        let released = &self.gpu.released;
        released.blocks.lock().unwrap_or_else(PoisonError::into_inner).push(block);
        // While a graph drops it, the backend must not be called. Then the next buffer that is made or dropped frees
        // it.
        if !is_releasing() {
            self.gpu.free_released();
        }
    }
}

impl Gpu {
    /// Frees the memory of [`SharedBuffer`]s that were dropped, in stream order after the last use of each, without
    /// waiting.
    fn free_released(&'static self) {
        let blocks = std::mem::take(
            &mut *self.released.blocks.lock().unwrap_or_else(PoisonError::into_inner),
        );
        if blocks.is_empty() {
            return;
        }
        // An error here was or will be reported by a call that can return it; the memory is lost then.
        let Ok(_current) = self.enter() else { return };
        let _ =
            self.despite_captures(|| blocks.into_iter().try_for_each(|block| self.free(&block)));
    }

    fn free(&'static self, block: &Block) -> Result<()> {
        let stream = self.released.stream.get(|| Stream::apart(self))?;
        for (_, event) in &block.uses {
            stream.wait(event)?;
        }
        // SAFETY: of `SharedBuffer::allocate`, and the stream is behind all uses.
        unsafe { memory::free(stream, block.ptr) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing without a device.
    #[test]
    fn memory_is_freed_after_the_streams_that_used_it_are_gone() {
        let Ok(gpu) = Gpu::of_tests() else { return };
        let stream = Stream::new(gpu.device()).unwrap();
        let buffer = {
            let [first, second] = [(); 2].map(|()| Stream::new(gpu.device()).unwrap());
            let buffer = SharedBuffer::new(&first, 1 << 20).unwrap();
            second.wait(&Event::mark(&first).unwrap()).unwrap();
            for stream in [&first, &second, &first] {
                // SAFETY: the memory is that long, and alive until the streams are done with it.
                unsafe { stream.zero(buffer.as_mut_ptr(), buffer.len()).unwrap() };
                buffer.mark_use(stream).unwrap();
            }
            assert_eq!(buffer.uses.lock().unwrap().len(), 2);
            buffer
        };
        drop(buffer);
        let again = SharedBuffer::new(&stream, 1 << 20).unwrap();
        // SAFETY: the memory is that long, and alive until the stream was waited for.
        unsafe { stream.zero(again.as_mut_ptr(), again.len()).unwrap() };
        stream.synchronize().unwrap();
    }

    /// Nothing without a device.
    #[test]
    fn memory_of_a_graph_is_allocated_beside_its_capture() {
        let Ok(stream) = Gpu::of_tests().and_then(Stream::apart) else { return };
        let mut kept = None;
        let graph = stream.capture(|| {
            let buffer = Arc::new(SharedBuffer::apart(stream.gpu(), 4096)?);
            kept = Some(Arc::downgrade(&buffer));
            // SAFETY: the graph keeps the memory.
            unsafe { stream.zero(buffer.as_mut_ptr(), buffer.len())? };
            stream.capture_under_way()?.expect("this is one").retain(buffer)
        });
        let graph = graph.unwrap();
        let kept = kept.unwrap();
        assert_eq!(kept.strong_count(), 1);
        for _ in 0..3 {
            // SAFETY: the memory is the graph's own.
            unsafe { graph.launch(&stream).unwrap() };
        }
        drop(graph);
        stream.synchronize().unwrap();
        stream.gpu().free_released();
        assert!(stream.synchronize().is_ok());
    }
}
