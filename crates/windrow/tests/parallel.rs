//! Groups of several GPUs. On a machine with fewer than two, or without NCCL, there is nothing to
//! test here; splitting, rendezvous and time-outs are tested beside their code.

#![cfg(target_os = "linux")]
#![cfg(feature = "parallel")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use windrow::cuda::DeviceTensor;
use windrow::parallel::{DataParallel, Job, Output, Rank, nccl_version};
use windrow::verify::random_tensor;
use windrow::*;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Time-out of the groups that lose a rank, and the time by which the others must have noticed.
const SHORT: Duration = Duration::from_secs(5);
const LATEST: Duration = Duration::from_secs(15);

/// Two devices or more, and NCCL.
fn devices() -> Option<Vec<u32>> {
    let found = cuda::devices().map_or(0, |d| d.len()) as u32;
    if found < 2 || nccl_version().is_err() {
        eprintln!("skipped: {found} CUDA devices, NCCL {:?}", nccl_version());
        return None;
    }
    Some((0..found).collect())
}

fn index(rank: &Rank) -> u32 {
    match rank.device() {
        Device::Cuda(index) => index,
        other => unreachable!("ranks are on CUDA, not on {other}"),
    }
}

/// conv2d of the batch, split over the ranks, against the same plan on one rank alone.
#[test]
fn any_batch_has_the_bits_of_one_device() {
    let Some(devices) = devices() else { return };
    let mut group = DataParallel::local(&devices, TIMEOUT).unwrap();
    // The last one is so large that two GPUs exchange it in another way.
    for n in [64, 63, 2, 1, 0, 2101] {
        for order in [[0, 1, 2, 3], [0, 2, 3, 1]] {
            let layout = Layout::with_order(&[n, 16, 20, 21], &order).unwrap();
            let x = random_tensor(1, TensorDesc::new(DType::F32, layout), -1.0, 1.0).unwrap();
            let w = TensorDesc::contiguous(DType::F32, &[24, 16, 3, 3]).unwrap();
            let w = random_tensor(2, w, -1.0, 1.0).unwrap();
            let outputs = group.run(|rank| conv2d_both_ways(rank, &x, &w)).unwrap();
            for [alone, together] in outputs {
                assert_eq!(alone.as_bytes(), together.as_bytes(), "batch {n}, {order:?}");
            }
        }
    }
}

fn conv2d_both_ways(rank: &mut Rank, x: &Tensor, w: &Tensor) -> Result<[Tensor; 2]> {
    let spec = Conv2dSpec::new(*x.desc(), *w.desc(), &Conv2dParams::default())?;
    let options = PlanOptions::default().with_device(rank.device());
    let whole = Conv2dPlan::new(&spec, &options)?;
    let mut on_device = rank.tensor(spec.x)?;
    rank.upload(&x.as_ref(), &mut on_device.as_mut()?)?.synchronize()?;
    let mut weights = rank.tensor(spec.w)?;
    if rank.index() == 1 {
        rank.upload(&w.as_ref(), &mut weights.as_mut()?)?.synchronize()?;
    }
    let there = rank.broadcast(&mut weights.as_mut()?, 1)?;
    rank.stream().wait(&there)?;
    let mut workspace = rank.workspace(2 * whole.workspace_bytes())?;
    let packed = whole.pack_weights(&weights.as_ref(), &mut workspace)?;
    let args = |x| Conv2dArgs::new(x, &packed);

    let mut y = [rank.tensor(spec.y)?, rank.tensor(spec.y)?];
    whole.run(&args(on_device.as_ref()), y[0].as_mut()?, &mut workspace)?;
    let there = rank.split(&mut y[1].as_mut()?, Output::Gathered, |rows, y| {
        let x = on_device.as_ref().narrow(0, rows)?;
        let part = Conv2dSpec::new(*x.desc(), spec.w, &spec.params())?.with_output(*y.desc());
        let part = Conv2dPlan::with_algorithm(&part, whole.algorithm(), &options)?;
        part.run(&args(x), y, &mut workspace)
    })?;
    rank.stream().wait(&there.expect("gathered"))?;
    let mut hosts = [Tensor::uninitialised(spec.y)?, Tensor::uninitialised(spec.y)?];
    for (host, y) in hosts.iter_mut().zip(&y) {
        rank.download(&y.as_ref(), &mut host.as_mut())?;
    }
    Ok(hosts)
}

#[test]
fn gradients_are_summed() {
    let Some(devices) = devices() else { return };
    let mut group = DataParallel::local(&devices, TIMEOUT).unwrap();
    let sums = group.run(|rank| {
        let own = [rank.index() as f32, 1.0, -2.5];
        let mut sum = DeviceTensor::from_host(&TensorRef::new(&own, &[3])?, index(rank))?;
        rank.all_reduce(&mut sum.as_mut()?)?;
        rank.finish()?;
        sum.to_host()?.to_vec::<f32>()
    });
    let world = devices.len() as f32;
    let want = vec![world * (world - 1.0) / 2.0, world, -2.5 * world];
    assert_eq!(sums.unwrap(), vec![want; devices.len()]);
}

/// Larger than the pinned buffers, and not a multiple of them.
#[test]
fn copies_through_pinned_buffers_keep_every_bit() {
    if cuda::devices().map_or(0, |d| d.len()) == 0 {
        return;
    }
    let mut group = DataParallel::local(&[0], TIMEOUT).unwrap();
    for len in [0, 1, 10_000_019] {
        let desc = TensorDesc::contiguous(DType::F32, &[len]).unwrap();
        let x = random_tensor(3, desc, -1.0, 1.0).unwrap();
        let same = group.run(|rank| {
            let mut there = rank.tensor(desc)?;
            let arrived = rank.upload(&x.as_ref(), &mut there.as_mut()?)?;
            rank.stream().wait(&arrived)?;
            let mut back = Tensor::uninitialised(desc)?;
            rank.download(&there.as_ref(), &mut back.as_mut())?;
            Ok(back.as_bytes() == x.as_bytes())
        });
        assert_eq!(same.unwrap(), [true], "{len} elements");
    }
}

#[test]
fn an_error_of_one_closure_releases_the_others() {
    let Some(devices) = devices() else { return };
    let start = Instant::now();
    let mut group = DataParallel::local(&devices, Duration::from_secs(600)).unwrap();
    let refused = group.run(|rank| {
        if rank.index() == 1 {
            return Err(Error::unsupported("taking part", "a test"));
        }
        reduce_for_ever(rank)
    });
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    let again = group.run(reduce_for_ever).unwrap_err();
    assert!(again.to_string().contains("rank 1 gave up"), "{again}");
    drop(group);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

#[test]
fn a_rank_that_does_not_take_part_is_not_waited_for() {
    let Some(devices) = devices() else { return };
    let mut group = DataParallel::local(&devices, SHORT).unwrap();
    // Connections between the ranks are made by the first operation.
    group.run(|rank| reduce(rank).map(drop)).unwrap();
    let start = Instant::now();
    let late = group.run(|rank| match rank.index() {
        1 => Ok(()),
        // The rank's own wait, and one that knows nothing of the group.
        _ => {
            reduce(rank)?;
            rank.stream().synchronize()
        }
    });
    assert!(matches!(late, Err(Error::Parallel { .. })), "{late:?}");
    assert!(start.elapsed() < LATEST, "{:?}", start.elapsed());
}

/// The first operation connects the ranks: its call waits for the others.
#[test]
fn a_first_operation_without_the_others_is_given_up() {
    let Some(devices) = devices() else { return };
    let mut group = DataParallel::local(&devices, SHORT).unwrap();
    let start = Instant::now();
    let alone = group.run(|rank| match rank.index() {
        0 => reduce(rank).map(drop),
        _ => Ok(()),
    });
    assert!(matches!(alone, Err(Error::Parallel { .. })), "{alone:?}");
    drop(group);
    assert!(start.elapsed() < LATEST, "{:?}", start.elapsed());
}

/// Operations that wait for another rank fill the device's queue, until a call waits as well.
#[test]
fn a_full_queue_does_not_hide_a_missing_rank() {
    let Some(devices) = devices() else { return };
    let mut group = DataParallel::local(&devices, SHORT).unwrap();
    group.run(|rank| reduce(rank).map(drop)).unwrap();
    let start = Instant::now();
    let late = group.run(|rank| {
        let mut t = rank.tensor(TensorDesc::contiguous(DType::F32, &[1000])?)?;
        match rank.index() {
            0 => (0..1_000_000).try_for_each(|_| rank.all_reduce(&mut t.as_mut()?).map(drop)),
            _ => Ok(()),
        }
    });
    assert!(matches!(late, Err(Error::Parallel { .. })), "{late:?}");
    drop(group);
    assert!(start.elapsed() < LATEST, "{:?}", start.elapsed());
}

fn reduce(rank: &Rank) -> Result<DeviceTensor> {
    let mut t = DeviceTensor::from_host(&TensorRef::new(&[1f32; 1000], &[1000])?, index(rank))?;
    let there = rank.all_reduce(&mut t.as_mut()?)?;
    rank.stream().wait(&there)?;
    Ok(t)
}

fn reduce_for_ever(rank: &mut Rank) -> Result<()> {
    loop {
        reduce(rank)?;
        rank.finish()?;
    }
}

/// A process that joins the job of its environment, and works until that fails; a test only where
/// [`lose_rank`] starts it.
#[test]
fn rank_of_a_job() {
    if std::env::var_os("WINDROW_TEST_RANK").is_none() {
        return;
    }
    let job = Job::from_env().unwrap().unwrap();
    let mut group = DataParallel::join(&job, SHORT).unwrap();
    let outcome = group.run(|rank| {
        reduce(rank)?;
        rank.finish()?;
        println!("\nconnected");
        reduce_for_ever(rank)
    });
    println!("\nended: {}", outcome.unwrap_err());
}

#[test]
fn a_killed_process_ends_the_others() {
    lose_rank(libc::SIGKILL, 29_710);
}

#[test]
fn a_stopped_process_ends_the_others() {
    lose_rank(libc::SIGSTOP, 29_720);
}

/// Two processes; rank 1 gets the signal while both work; rank 0 has to end with an error.
fn lose_rank(signal: libc::c_int, port: u16) {
    if devices().is_none() {
        return;
    }
    let mut ranks = [start_rank(0, port), start_rank(1, port)];
    let mut lines = ranks.each_mut().map(|rank| {
        BufReader::new(rank.stdout.take().expect("piped"))
            .lines()
            .map_while(std::result::Result::ok)
    });
    for lines in &mut lines {
        assert!(lines.any(|line| line == "connected"));
    }
    std::thread::sleep(Duration::from_millis(200));
    let start = Instant::now();
    // SAFETY: a signal to a process that this one started and has not waited for.
    assert_eq!(unsafe { libc::kill(ranks[1].id() as libc::pid_t, signal) }, 0);
    let ended = lines[0].find(|line| line.starts_with("ended: "));
    let elapsed = start.elapsed();
    let left = ranks[0].wait().unwrap();
    println!(
        "signal {signal}: after {elapsed:.1?} {ended:?}; process gone after {:.1?}",
        start.elapsed()
    );
    ranks[1].kill().unwrap();
    ranks[1].wait().unwrap();
    assert!(ended.is_some_and(|words| words.contains("rank 0 of 2")));
    assert!(left.success() && elapsed < LATEST && start.elapsed() < 2 * LATEST);
}

fn start_rank(rank: usize, port: u16) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "rank_of_a_job", "--nocapture"])
        .env("WINDROW_TEST_RANK", "1")
        .envs([("RANK", rank.to_string()), ("LOCAL_RANK", rank.to_string())])
        .envs([("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")])
        .env("MASTER_PORT", port.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}
