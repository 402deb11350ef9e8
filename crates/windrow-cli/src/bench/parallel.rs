//! `bench conv2d --devices 0,1`, or as a rank of a job: each layer on one GPU and on all of them.

use super::layers::Layer;
use super::{Bench, by_x};
use crate::failure::Failure;
use crate::operator::Operator;
use crate::print;
use crate::table::{Columns, digits, percent};
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};
use windrow::cuda::{DeviceTensor, Event};
use windrow::parallel::{DataParallel, Job, Output, Rank, nccl_version};
use windrow::verify::random_tensor;
use windrow::{
    Conv2dAlgorithm, Conv2dArgs, Conv2dPlan, Conv2dSpec, DType, PackedWeights, PlanOptions, Tensor,
    TensorDesc, TensorMut, TensorRef, Weights, Workspace, cuda,
};

/// Samples of each time, unless `--iterations` says otherwise.
const SAMPLES: usize = 11;
/// A sample is so many runs that it lasts about this long.
const SAMPLE_MS: f32 = 5.0;
/// Layers that are faster on one GPU do not count in the mean.
const SHORT_MS: f64 = 0.2;

/// The ranks that are measured.
pub(super) enum Ranks {
    Devices(Vec<u32>),
    Job(Job),
}

impl Ranks {
    /// `None` if one device is to be measured by itself.
    pub(super) fn of(args: &Bench) -> Result<Option<Self>, Failure> {
        if !args.devices.is_empty() {
            return Ok(Some(Ranks::Devices(args.devices.clone())));
        }
        match Job::from_env()? {
            Some(job) if job.world > 1 => Ok(Some(Ranks::Job(job))),
            _ if args.gather => Err(Failure::Input(
                "--gather: expected --devices, or a job of several ranks".into(),
            )),
            _ => Ok(None),
        }
    }

    /// The group, and whether this process reports for it.
    fn connect(self, timeout: Duration) -> windrow::Result<(DataParallel, bool)> {
        match self {
            Ranks::Job(job) => Ok((DataParallel::join(&job, timeout)?, job.rank == 0)),
            Ranks::Devices(devices) => {
                let devices = match nccl_version() {
                    Err(missing) if devices.len() > 1 => {
                        let alone = devices[0];
                        print::note(format!("{missing}; measuring on cuda:{alone} alone"));
                        &devices[..1]
                    }
                    _ => &devices,
                };
                Ok((DataParallel::local(devices, timeout)?, true))
            }
        }
    }
}

/// A layer on all ranks. Field names are the keys in JSON.
#[derive(Clone, Debug, Serialize)]
struct Row {
    case: String,
    dtype: &'static str,
    algorithm: String,
    shape: String,
    plan: String,
    /// The whole batch on the fastest of the GPUs.
    one_ms: f64,
    /// Each rank's rows, on the slowest rank.
    sharded_ms: f64,
    /// `one_ms` over `sharded_ms`, and that over the number of ranks.
    speedup: f64,
    efficiency: f64,
    gather: Option<Gather>,
    /// Every rank's output has the bits of one GPU's.
    identical: bool,
}

/// The cost of having all rows on all ranks; times of the slowest rank.
#[derive(Clone, Debug, Serialize)]
struct Gather {
    /// The gather alone.
    ms: f64,
    /// Bytes that a rank receives, over the time of the gather.
    gbps: f64,
    /// A run of a row of runs, each gather beside the next run's kernels.
    gathered_ms: f64,
    speedup: f64,
    /// The share of the gather's time that is hidden; 1 is all of it.
    hidden: f64,
}

#[derive(Serialize)]
struct Report {
    ranks: usize,
    gpu: String,
    nccl: Option<String>,
    upload_gbps: f64,
    /// Geometric mean of `speedup` over layers of at least 0.2 ms.
    sharded_speedup: Option<f64>,
    gathered_speedup: Option<f64>,
    rows: Vec<Row>,
}

pub(super) fn run(
    args: &Bench,
    ranks: Ranks,
    layers: &[Layer],
    timeout: Duration,
) -> Result<(), Failure> {
    if args.operators != [Operator::Conv2d] {
        return Err(Failure::Input("several devices: expected the operator conv2d".into()));
    }
    let algorithm = args.algorithm.as_deref().map(str::parse::<Conv2dAlgorithm>).transpose()?;
    let dtypes = if args.dtype.is_empty() { &[DType::F32][..] } else { &args.dtype };
    let output = if args.gather { Output::Gathered } else { Output::Sharded };
    let samples = args.iterations.map_or(SAMPLES, usize::from);

    let (mut group, reports) = ranks.connect(timeout)?;
    let mut measured = group.run(|rank| {
        let mut rows = Vec::new();
        let mut upload_gbps = 0f64;
        for layer in layers {
            for &dtype in dtypes {
                let spec = super::conv2d::spec(layer, dtype)?;
                let mut case = Case::new(rank, &spec, algorithm)?;
                upload_gbps = upload_gbps.max(case.upload_gbps);
                rows.push(case.measure(rank, &layer.name, output, samples)?);
            }
        }
        let windrow::Device::Cuda(index) = rank.device() else { unreachable!("ranks are on CUDA") };
        let gpu = cuda::devices()?.swap_remove(index as usize).name;
        let speedups = |of: fn(&Row) -> Option<f64>| {
            geometric_mean(rows.iter().filter(|r| r.one_ms >= SHORT_MS).filter_map(of))
        };
        Ok(Report {
            ranks: rank.world(),
            gpu,
            nccl: nccl_version().ok(),
            upload_gbps,
            sharded_speedup: speedups(|r| Some(r.speedup)),
            gathered_speedup: speedups(|r| r.gather.as_ref().map(|g| g.speedup)),
            rows,
        })
    })?;
    let report = measured.swap_remove(0);
    if reports {
        if args.json {
            print::out(print::json(&report))?;
        } else {
            print::out(&report)?;
        }
    }
    match report.rows.iter().filter(|r| !r.identical).count() {
        0 => Ok(()),
        n => Err(Failure::Verification(format!(
            "{n} of {} layers differ from one GPU's result",
            report.rows.len()
        ))),
    }
}

/// A layer on one rank: the whole batch and the rank's part of it, in the same tensors.
struct Case {
    whole: Conv2dPlan,
    /// `None` without rows.
    part: Option<Conv2dPlan>,
    packed: PackedWeights,
    workspace: Workspace,
    x: DeviceTensor,
    ys: [DeviceTensor; 2],
    /// The events after the latest gather of each y.
    gathered: [Option<Arc<Event>>; 2],
    token: DeviceTensor,
    upload_gbps: f64,
}

impl Case {
    fn new(
        rank: &mut Rank,
        spec: &Conv2dSpec,
        algorithm: Option<Conv2dAlgorithm>,
    ) -> windrow::Result<Self> {
        let options = PlanOptions::default().with_device(rank.device());
        let whole = match algorithm {
            Some(algorithm) => Conv2dPlan::with_algorithm(spec, algorithm, &options)?,
            None => Conv2dPlan::new(spec, &options)?,
        };
        let host = input(spec.x)?;
        let mut x = rank.tensor(spec.x)?;
        rank.stream().synchronize()?;
        let start = Instant::now();
        rank.upload(&host.as_ref(), &mut x.as_mut()?)?.synchronize()?;
        let upload_gbps = spec.x.bytes() as f64 / start.elapsed().as_secs_f64() / 1e9;

        let rows = rank.shard(spec.x.shape()[0]);
        let part = match rows.is_empty() {
            true => None,
            false => {
                let (x, params) = (x.as_ref().narrow(0, rows)?, spec.params());
                let part = Conv2dSpec::new(*x.desc(), spec.w, &params)?;
                Some(Conv2dPlan::with_algorithm(&part, whole.algorithm(), &options)?)
            }
        };
        // Only rank 0 has the weights at first.
        let mut w = rank.tensor(spec.w)?;
        if rank.index() == 0 {
            let host = random_tensor(2, spec.w, -1.0, 1.0)?;
            rank.upload(&host.as_ref(), &mut w.as_mut()?)?.synchronize()?;
        }
        let there = rank.broadcast(&mut w.as_mut()?, 0)?;
        rank.stream().wait(&there)?;
        let plans = [Some(&whole), part.as_ref()];
        let bytes = plans.into_iter().flatten().map(Conv2dPlan::workspace_bytes).max();
        let mut workspace = rank.workspace(bytes.unwrap_or(0))?;
        let packed = whole.pack_weights(&w.as_ref(), &mut workspace)?;
        let ys = [rank.tensor(spec.y)?, rank.tensor(spec.y)?];
        let token = rank.tensor(TensorDesc::contiguous(DType::I32, &[1])?)?;
        Ok(Case {
            whole,
            part,
            packed,
            workspace,
            x,
            ys,
            gathered: [None, None],
            token,
            upload_gbps,
        })
    }

    /// The whole batch on this rank.
    fn run_whole(&mut self, i: usize) -> windrow::Result<()> {
        let y = self.ys[i % 2].as_mut()?;
        let w = Weights::Packed(&self.packed);
        let args = Conv2dArgs::new(self.x.as_ref(), w);
        self.whole.run(&args, y, &mut self.workspace)
    }

    /// Computes this rank's rows.
    fn run_part(&mut self, rank: &Rank, i: usize, output: Output) -> windrow::Result<()> {
        let Case { part, packed, workspace, x, ys, gathered, .. } = self;
        if let Some(earlier) = gathered[i % 2].take() {
            rank.stream().wait(&earlier)?;
        }
        let work = |rows, y: TensorMut<'_>| match part {
            Some(plan) => {
                let x = x.as_ref().narrow(0, rows)?;
                plan.run(&Conv2dArgs::new(x, &*packed), y, workspace)
            }
            None => Ok(()),
        };
        gathered[i % 2] = rank.split(&mut ys[i % 2].as_mut()?, output, work)?;
        Ok(())
    }

    /// The gather of an output that is there already.
    fn run_gather(&mut self, rank: &Rank, i: usize) -> windrow::Result<()> {
        self.gathered[i % 2] = Some(rank.all_gather(&mut self.ys[i % 2].as_mut()?)?);
        Ok(())
    }

    /// Milliseconds of a run on this rank, in a row of `runs` that all ranks begin together.
    fn time(
        &mut self,
        rank: &Rank,
        runs: usize,
        mut run: impl FnMut(&mut Self, usize) -> windrow::Result<()>,
    ) -> windrow::Result<f32> {
        let together = rank.all_reduce(&mut self.token.as_mut()?)?;
        rank.stream().wait(&together)?;
        let start = Event::record(rank.stream())?;
        (0..runs).try_for_each(|i| run(self, i))?;
        for gathered in self.gathered.iter_mut().filter_map(Option::take) {
            rank.stream().wait(&gathered)?;
        }
        let end = Event::record(rank.stream())?;
        rank.finish()?;
        Ok(end.milliseconds_since(&start)? / runs as f32)
    }

    fn measure(
        &mut self,
        rank: &mut Rank,
        name: &str,
        output: Output,
        samples: usize,
    ) -> windrow::Result<Row> {
        // A single rank has nothing to gather.
        let output = if rank.world() > 1 { output } else { Output::Sharded };
        let identical = self.is_identical(rank, output)?;
        type Contestant = fn(&mut Case, &Rank, usize) -> windrow::Result<()>;
        let contestants: &[Contestant] = &[
            |case, _, i| case.run_whole(i),
            |case, rank, i| case.run_part(rank, i, Output::Sharded),
            |case, rank, i| case.run_part(rank, i, Output::Gathered),
            |case, rank, i| case.run_gather(rank, i),
        ];
        let contestants = &contestants[..if output == Output::Gathered { 4 } else { 2 }];
        // As many runs on every rank.
        let mut runs = Vec::new();
        for run in contestants {
            let once = self.time(rank, 3, |case, i| run(case, rank, i))?;
            let slowest = share(rank, once)?.into_iter().fold(0.0, f32::max);
            runs.push(((SAMPLE_MS / slowest) as usize).clamp(2, 200));
        }
        let mut times = vec![Vec::new(); contestants.len()];
        for _ in 0..samples {
            for ((times, run), &runs) in times.iter_mut().zip(contestants).zip(&runs) {
                times.push(self.time(rank, runs, |case, i| run(case, rank, i))?);
            }
        }
        let mut of_ranks = Vec::new();
        for times in &mut times {
            times.sort_by(f32::total_cmp);
            of_ranks.push(share(rank, times[times.len() / 2])?);
        }
        let slowest = |i: usize| f64::from(of_ranks[i].iter().copied().fold(0.0, f32::max));
        let one_ms = f64::from(of_ranks[0].iter().copied().fold(f32::INFINITY, f32::min));
        let sharded_ms = slowest(1);
        let spec = self.whole.spec();
        let received = spec.y.bytes() as f64 * (1.0 - 1.0 / rank.world() as f64);
        let gather = (output == Output::Gathered).then(|| {
            let (gathered_ms, ms) = (slowest(2), slowest(3));
            Gather {
                ms,
                gbps: received / ms / 1e6,
                gathered_ms,
                speedup: one_ms / gathered_ms,
                hidden: (sharded_ms + ms - gathered_ms) / ms,
            }
        });
        let identical = share(rank, f32::from(u8::from(identical)))?.iter().all(|&v| v == 1.0);
        let speedup = one_ms / sharded_ms;
        Ok(Row {
            case: name.to_owned(),
            dtype: DType::name(spec.x.dtype),
            algorithm: self.whole.algorithm().name().into(),
            shape: format!("{} k{}", by_x(spec.x.shape()), spec.w.shape()[0]),
            plan: self.whole.explain(),
            one_ms,
            sharded_ms,
            speedup,
            efficiency: speedup / rank.world() as f64,
            gather,
            identical,
        })
    }

    /// Compares what all ranks compute together with what this one computes alone, bit by bit.
    fn is_identical(&mut self, rank: &mut Rank, output: Output) -> windrow::Result<bool> {
        self.run_whole(0)?;
        self.run_part(rank, 1, output)?;
        if let Some(gathered) = self.gathered[1].take() {
            rank.stream().wait(&gathered)?;
        }
        let desc = *self.ys[0].desc();
        let mut hosts = [Tensor::uninitialised(desc)?, Tensor::uninitialised(desc)?];
        for (host, y) in hosts.iter_mut().zip(&self.ys) {
            rank.download(&y.as_ref(), &mut host.as_mut())?;
        }
        let n = desc.shape()[0];
        let rows = if output == Output::Gathered { 0..n } else { rank.shard(n) };
        let row = desc.bytes() / n.max(1);
        let bytes = rows.start * row..rows.end * row;
        Ok(hosts[0].as_bytes()[bytes.clone()] == hosts[1].as_bytes()[bytes])
    }
}

/// Numbers as behind a ReLU, which repeat after a prime number of elements.
fn input(desc: TensorDesc) -> windrow::Result<Tensor> {
    let pattern = random_tensor(1, TensorDesc::contiguous(desc.dtype, &[1_000_003])?, 0.0, 1.0)?;
    let mut x = Tensor::uninitialised(desc)?;
    for chunk in x.as_bytes_mut().chunks_mut(pattern.as_bytes().len()) {
        chunk.copy_from_slice(&pattern.as_bytes()[..chunk.len()]);
    }
    Ok(x)
}

/// A number of each rank, for all of them.
fn share(rank: &Rank, value: f32) -> windrow::Result<Vec<f32>> {
    let windrow::Device::Cuda(index) = rank.device() else { unreachable!("ranks are on CUDA") };
    let mut values = vec![0f32; rank.world()];
    values[rank.index()] = value;
    let own = TensorRef::new(&values, &[values.len()])?;
    let mut shared = DeviceTensor::from_host(&own, index)?;
    rank.all_gather(&mut shared.as_mut()?)?;
    rank.finish()?;
    shared.to_host()?.to_vec()
}

fn geometric_mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let logs: Vec<f64> = values.map(f64::ln).collect();
    (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let nccl = self.nccl.as_ref().map_or("no NCCL".to_owned(), |v| format!("NCCL {v}"));
        writeln!(
            f,
            "{} x {}, {nccl}; times in ms, efficiency of the shards",
            self.ranks, self.gpu
        )?;
        let gathers = self.rows.iter().any(|r| r.gather.is_some());
        let mut headings = vec!["layer", "shape", ">1 GPU", ">sharded", ">eff"];
        if gathers {
            headings.extend([">gathered", ">gather", ">GB/s", ">hidden"]);
        }
        headings.push("bits");
        let mut table = Columns::new(&headings);
        for r in &self.rows {
            let name = format!("{} {}", r.case, r.dtype);
            let times = [r.one_ms, r.sharded_ms].map(digits);
            let mut cells = vec![name, r.shape.clone()];
            cells.extend(times);
            cells.push(percent(r.efficiency));
            if let Some(g) = &r.gather {
                cells.extend([g.gathered_ms, g.ms, g.gbps].map(digits));
                cells.push(percent(g.hidden));
            }
            cells.push(if r.identical { "equal" } else { "DIFFER" }.into());
            table.row(cells);
        }
        write!(f, "{table}")?;
        for (what, mean) in [("sharded", self.sharded_speedup), ("gathered", self.gathered_speedup)]
        {
            if let Some(mean) = mean {
                writeln!(
                    f,
                    "{what}: {} times one GPU, geometric mean of layers of at least {SHORT_MS} ms",
                    digits(mean)
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_geometric() {
        assert_eq!(geometric_mean([].into_iter()), None);
        assert!((geometric_mean([1.0, 4.0].into_iter()).unwrap() - 2.0).abs() < 1e-12);
    }

    #[test]
    fn inputs_repeat_and_fill_the_tensor() {
        let desc = TensorDesc::contiguous(DType::F16, &[3, 1_000_003]).unwrap();
        let x = input(desc).unwrap();
        let (first, rest) = x.as_bytes().split_at(2 * 1_000_003);
        assert!(rest.chunks(first.len()).all(|chunk| chunk == first));
    }
}
