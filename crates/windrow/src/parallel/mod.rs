//! Several GPUs, of one machine or many: the batch split over them, results exchanged by NCCL.
//!
//! A [`DataParallel`] holds the ranks of this process: one for each of its devices
//! ([`DataParallel::local`]), or one of a job of several processes ([`DataParallel::join`]).
//! [`DataParallel::run`] calls a closure for each rank, on a thread of its own; the closure makes
//! plans for its rows of the batch and runs them as on one device.
//!
//! ```no_run
//! use std::time::Duration;
//! use windrow::parallel::{DataParallel, Output};
//! use windrow::*;
//! # fn main() -> windrow::Result<()> {
//! let mut group = DataParallel::local(&[0, 1], Duration::from_secs(60))?;
//! group.run(|rank| {
//!     let rows = rank.shard(64);
//!     let desc = TensorDesc::contiguous(DType::F32, &[rows.len(), 1024])?;
//!     let options = PlanOptions::default().with_device(rank.device());
//!     let plan = GeluPlan::new(&GeluSpec::new(desc, Approximate::Tanh)?, &options)?;
//!     let mut workspace = rank.workspace(plan.workspace_bytes())?;
//!     let x = rank.tensor(desc)?;
//!     let mut y = rank.tensor(TensorDesc::contiguous(DType::F32, &[64, 1024])?)?;
//!     // Every rank computes its rows of y, and gets those of the others.
//!     rank.split(&mut y.as_mut()?, Output::Gathered, |_, y| {
//!         plan.run(&GeluArgs::new(x.as_ref()), y, &mut workspace)
//!     })?;
//!     rank.finish()
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! A rank that fails or hangs makes all others return [`Error::Parallel`] within the group's
//! time-out; waits for streams end as well. See `docs/parallel.md`.

mod job;
mod link;
mod nccl;
mod rendezvous;
mod shard;
mod staging;

pub use job::Job;
pub use nccl::nccl_version;
pub use shard::shard;

use crate::gpu::{DeviceTensor, Event, Gpu, Stream};
use crate::tensor::check_device;
use crate::{Device, Error, Result, TensorDesc, TensorMut, TensorRef, Workspace};
use link::Link;
use nccl::Communicator;
use rendezvous::Id;
use shard::{blocks, is_dense, rows_of};
use staging::Staging;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The part that a rank holds of an output y [n, ..] after [`Rank::split`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Output {
    /// Its own rows.
    Sharded,
    /// All rows, on every rank.
    Gathered,
}

/// The ranks of this process.
pub struct DataParallel {
    ranks: Vec<Rank>,
}

/// A device of a group, for the closure of [`DataParallel::run`].
///
/// Collective operations ([`broadcast`](Rank::broadcast), [`all_gather`](Rank::all_gather),
/// [`all_reduce`](Rank::all_reduce)) have to be called by all ranks, in the same order and with
/// tensors of the same size. They return at once: the work is ordered after what the rank's
/// [`stream`](Rank::stream) has been given so far, and done at the event that is returned. Until then
/// the tensor belongs to the operation, while the stream goes on with other work: let it
/// [`wait`](Stream::wait) for the event before it uses the tensor. These events hold no time.
pub struct Rank {
    index: usize,
    world: usize,
    gpu: &'static Gpu,
    /// The stream of the kernels.
    stream: Arc<Stream>,
    /// The stream of the collective operations.
    exchange: Stream,
    staging: Staging,
    /// `None` if there is nobody else.
    link: Option<Link<Communicator>>,
}

impl std::fmt::Debug for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {} on {}", self.index, self.world, self.device())
    }
}

impl std::fmt::Debug for DataParallel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.ranks).finish()
    }
}

impl DataParallel {
    /// A rank for each of these CUDA devices, all in this process. One device needs no NCCL.
    ///
    /// `timeout` bounds connecting, and every collective operation from its call to its end,
    /// together with the work that it waits for.
    ///
    /// # Errors
    /// [`Error::Parameter`] for no device or one named twice, [`Error::NoDevice`],
    /// [`Error::Backend`] without NCCL, [`Error::Parallel`].
    pub fn local(devices: &[u32], timeout: Duration) -> Result<Self> {
        let twice = (1..devices.len()).any(|i| devices[..i].contains(&devices[i]));
        if devices.is_empty() || twice {
            let given = format!("{devices:?}");
            return Err(Error::parameter("devices", given, "at least one, each once"));
        }
        let gpus =
            devices.iter().map(|&d| Gpu::get(Device::Cuda(d))).collect::<Result<Vec<_>>>()?;
        let world = gpus.len();
        for (gpu, peer) in gpus.iter().flat_map(|g| gpus.iter().map(move |p| (g, p))) {
            if !std::ptr::eq(*gpu, *peer) {
                gpu.allow_access_by(peer)?;
            }
        }
        let id = if world > 1 { nccl::unique_id()? } else { [0; 128] };
        // Connecting is collective: all ranks at the same time.
        let ranks = std::thread::scope(|s| {
            let connect =
                |(index, gpu)| s.spawn(move || Rank::new(gpu, index, world, &id, timeout));
            let ranks: Vec<_> = gpus.into_iter().enumerate().map(connect).collect();
            ranks.into_iter().map(|r| r.join().expect("no panic")).collect::<Result<Vec<_>>>()
        })?;
        Ok(DataParallel { ranks })
    }

    /// The rank of a job that this process is, on the CUDA device of its local rank.
    ///
    /// # Errors
    /// As [`DataParallel::local`]; [`Error::Parallel`] also if not all ranks come in time.
    pub fn join(job: &Job, timeout: Duration) -> Result<Self> {
        let deadline = Instant::now() + timeout;
        let visible = crate::cuda::devices()?.len();
        let gpu = Gpu::get(Device::Cuda(job.device(visible)?))?;
        let id = match job.world {
            1 => [0; 128],
            _ => rendezvous::exchange(job, deadline, nccl::unique_id)?,
        };
        Ok(DataParallel { ranks: vec![Rank::new(gpu, job.rank, job.world, &id, timeout)?] })
    }

    /// Calls `work` for every rank of this process, each on a thread of its own, and waits until
    /// their communication is done. The results are in the order of the ranks.
    ///
    /// # Errors
    /// The first error: what `work` returned, or [`Error::Parallel`]. The other ranks of the process
    /// are released at once, those of other processes by their time-outs, and a group of several
    /// ranks is of no more use.
    ///
    /// # Panics
    /// If `work` does.
    pub fn run<T: Send>(&mut self, work: impl Fn(&mut Rank) -> Result<T> + Sync) -> Result<Vec<T>> {
        let links: Vec<_> =
            self.ranks.iter().filter_map(|r| r.link.as_ref()).map(Link::handle).collect();
        let first_error = Mutex::new(None::<Error>);
        let run_one = |rank: &mut Rank| {
            let outcome = catch_unwind(AssertUnwindSafe(|| -> Result<T> {
                let value = work(rank)?;
                rank.finish()?;
                Ok(value)
            }));
            let reason = match &outcome {
                Ok(Ok(_)) => return outcome,
                Ok(Err(error)) => {
                    let mut first = first_error.lock().unwrap_or_else(|e| e.into_inner());
                    first.get_or_insert(error.clone());
                    error.to_string()
                }
                Err(_) => "it panicked".into(),
            };
            let reason = format!("rank {} gave up: {reason}", rank.index);
            links.iter().for_each(|link| link.fail(&reason));
            outcome
        };
        let outcomes: Vec<Result<T>> = std::thread::scope(|s| {
            let threads: Vec<_> =
                self.ranks.iter_mut().map(|rank| s.spawn(|| run_one(rank))).collect();
            let joined = threads.into_iter().map(|t| t.join().and_then(|outcome| outcome));
            joined.map(|outcome| outcome.unwrap_or_else(|panic| resume_unwind(panic))).collect()
        });
        match first_error.into_inner().unwrap_or_else(|e| e.into_inner()) {
            Some(error) => Err(error),
            None => outcomes.into_iter().collect(),
        }
    }
}

impl Drop for DataParallel {
    fn drop(&mut self) {
        // Leaving is collective: all ranks at the same time.
        std::thread::scope(|s| {
            self.ranks.iter_mut().filter_map(|r| r.link.as_mut()).for_each(|link| {
                s.spawn(|| link.close());
            });
        });
    }
}

impl Rank {
    fn new(
        gpu: &'static Gpu,
        index: usize,
        world: usize,
        id: &Id,
        timeout: Duration,
    ) -> Result<Self> {
        let link = match world {
            1 => None,
            _ => Some(Link::new(Communicator::new(gpu, id, index, world)?, index, world, timeout)?),
        };
        Ok(Rank {
            index,
            world,
            gpu,
            stream: Arc::new(Stream::new(gpu.device())?),
            exchange: Stream::with_priority(gpu)?,
            staging: Staging::new(gpu)?,
            link,
        })
    }

    /// The number of this rank, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// The device of this rank.
    pub fn device(&self) -> Device {
        self.gpu.device()
    }

    /// The stream of its kernels, which the workspaces of [`Rank::workspace`] are on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// A workspace on the rank's device and stream.
    ///
    /// # Errors
    /// As [`Workspace::new`].
    pub fn workspace(&self, bytes: usize) -> Result<Workspace> {
        Workspace::on_shared(&self.stream, bytes)
    }

    /// A tensor on the rank's device.
    ///
    /// # Errors
    /// As [`DeviceTensor::new`].
    pub fn tensor(&self, desc: TensorDesc) -> Result<DeviceTensor> {
        DeviceTensor::new(desc, self.device())
    }

    /// The rows of a batch of `n` that belong to this rank: see [`shard`].
    pub fn shard(&self, n: usize) -> Range<usize> {
        shard(n, self.index, self.world)
    }

    /// Computes this rank's rows of y [n, ..] by `work`, which gets their range and the part of y;
    /// it is not called for an empty range. For [`Output::Gathered`] then starts
    /// [`Rank::all_gather`], and returns its event.
    ///
    /// # Errors
    /// What `work` returns, and as [`Rank::all_gather`].
    pub fn split(
        &self,
        y: &mut TensorMut<'_>,
        output: Output,
        work: impl FnOnce(Range<usize>, TensorMut<'_>) -> Result<()>,
    ) -> Result<Option<Arc<Event>>> {
        blocks(&y.as_ref(), self.world)?;
        let rows = self.shard(y.shape()[0]);
        if !rows.is_empty() {
            work(rows.clone(), rows_of(y, rows)?)?;
        }
        match output {
            Output::Sharded => Ok(None),
            Output::Gathered => self.all_gather(y).map(Some),
        }
    }

    /// Brings the rows of all ranks into y [n, ..], in place: each rank has written those of
    /// [`Rank::shard`].
    ///
    /// # Errors
    /// [`Error::WrongDevice`], [`Error::Rank`], [`Error::Strides`] unless the rows are dense blocks
    /// that follow one another (the order of the other dimensions does not matter);
    /// [`Error::Parallel`].
    pub fn all_gather(&self, y: &mut TensorMut<'_>) -> Result<Arc<Event>> {
        let blocks = blocks(&y.as_ref(), self.world)?;
        self.collective("all_gather", y, |nccl, base, stream| {
            // SAFETY: the blocks are y's memory; the rest is said of collective operations.
            unsafe { nccl.gather(base, &blocks, stream) }
        })
    }

    /// Brings the elements of rank `root`'s tensor to all ranks: weights, once.
    ///
    /// # Errors
    /// [`Error::Parameter`] if there is no such rank, [`Error::WrongDevice`], [`Error::Strides`]
    /// unless the tensor is dense, [`Error::Parallel`].
    pub fn broadcast(&self, t: &mut TensorMut<'_>, root: usize) -> Result<Arc<Event>> {
        if root >= self.world {
            return Err(Error::parameter("root", root, format!("a rank below {}", self.world)));
        }
        let bytes = t.desc().bytes();
        self.collective("broadcast", t, |nccl, base, stream| {
            // SAFETY: the tensor is dense; the rest is said of collective operations.
            unsafe { nccl.broadcast(base, bytes, root, stream) }
        })
    }

    /// Sums the elements over the ranks, to all of them: gradients of weights. The order of the
    /// additions depends on NCCL and the number of ranks, not on the run.
    ///
    /// # Errors
    /// As [`Rank::broadcast`].
    pub fn all_reduce(&self, t: &mut TensorMut<'_>) -> Result<Arc<Event>> {
        let (len, dtype) = (t.layout().len(), t.dtype());
        self.collective("all_reduce", t, |nccl, base, stream| {
            // SAFETY: the tensor is dense; the rest is said of collective operations.
            unsafe { nccl.all_reduce(base, len, dtype, stream) }
        })
    }

    fn collective(
        &self,
        what: &'static str,
        t: &mut TensorMut<'_>,
        call: impl FnOnce(&mut Communicator, *mut u8, &Stream) -> Result<(), String>,
    ) -> Result<Arc<Event>> {
        check_device("tensor", t.device(), self.device())?;
        if !is_dense(&t.as_ref()) {
            return Err(Error::Strides {
                arg: "tensor",
                given: t.strides().to_vec(),
                expected: "no gaps between the elements".into(),
            });
        }
        self.exchange.wait(&Event::mark(&self.stream)?)?;
        let record = || Event::mark(&self.exchange);
        match (&self.link, t.address_range()) {
            (Some(link), Some((base, _))) => {
                link.start(what, |nccl| call(nccl, base as *mut u8, &self.exchange), record)
            }
            _ => record().map(Arc::new),
        }
    }

    /// Copies a tensor from the host through pinned memory, beside kernels; `x` may be changed when
    /// this returns, and `y` is complete at the event. Ordered after what the rank's stream has
    /// been given so far.
    ///
    /// # Errors
    /// [`Error::WrongDevice`], [`Error::Shape`], [`Error::DType`] or [`Error::Strides`] if the two
    /// differ or are not dense; [`Error::OutOfMemory`], [`Error::Backend`].
    pub fn upload(&mut self, x: &TensorRef<'_>, y: &mut TensorMut<'_>) -> Result<Arc<Event>> {
        self.staging.upload(x, y, &self.stream)
    }

    /// Copies a tensor to the host through pinned memory, when the rank's stream has come past what
    /// it has been given so far; done when it returns.
    ///
    /// # Errors
    /// As [`Rank::upload`].
    pub fn download(&mut self, x: &TensorRef<'_>, y: &mut TensorMut<'_>) -> Result<()> {
        self.staging.download(x, y, &self.stream)
    }

    /// Waits until all collective operations and kernels of this rank are done.
    ///
    /// # Errors
    /// [`Error::Parallel`] if a rank failed or did not take part in time, [`Error::Backend`].
    pub fn finish(&self) -> Result<()> {
        self.link.as_ref().map_or(Ok(()), Link::finish)?;
        self.stream.synchronize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_once() {
        for bad in [&[][..], &[0, 1, 0]] {
            let error = DataParallel::local(bad, Duration::from_secs(1)).unwrap_err();
            assert!(matches!(error, Error::Parameter { name: "devices", .. }), "{error}");
        }
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        let error = DataParallel::local(&[4000], Duration::from_secs(1)).unwrap_err();
        assert!(matches!(error, Error::NoDevice { .. }), "{error}");
    }

    /// With NCCL a version, without it words about how to get one.
    #[test]
    fn nccl_is_found_or_explained() {
        match nccl_version() {
            Ok(version) => assert!(version.starts_with("2."), "{version}"),
            Err(error) => assert!(error.to_string().contains("nvidia-nccl"), "{error}"),
        }
    }
}
