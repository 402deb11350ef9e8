//! Tests of changing filters on a GPU. Without a GPU they do nothing.

use crate::conv2d::{
    Conv2dAlgorithm, Conv2dArgs, Conv2dParams, Conv2dPlan, Conv2dSpec, FilterCache, Weights,
};
use crate::gpu::{DeviceTensor, Event, Gpu, Graph, PinnedBuffer, Stream, copy};
use crate::verification::random_tensor;
use crate::{DType, Device, Layout, PlanOptions, TensorDesc, Workspace};

/// A convolution with tensors of its own.
struct Layer {
    plan: Conv2dPlan,
    x: DeviceTensor,
    w: DeviceTensor,
    seed: u64,
}

fn upload(seed: u64, desc: TensorDesc) -> DeviceTensor {
    let host = random_tensor(seed, desc, -1.0, 1.0).unwrap();
    DeviceTensor::from_host(&host.as_ref(), 0).unwrap()
}

/// A stream that may be captured while other tests use the default stream; the tests wait for it themselves.
fn stream() -> Stream {
    Stream::apart(Gpu::get(Device::Cuda(0)).unwrap()).unwrap()
}

/// A layer for each algorithm of the GPU, element type and layout.
fn layers() -> Vec<Layer> {
    let mut layers = Vec::new();
    if !crate::cuda::devices().is_ok_and(|d| !d.is_empty()) {
        return layers;
    }
    let options = PlanOptions { device: Device::Cuda(0), ..PlanOptions::default() };
    for (dtype, order) in [
        (DType::F32, [0, 1, 2, 3]),
        (DType::F32, [0, 2, 3, 1]),
        (DType::F16, [0, 2, 3, 1]),
        (DType::BF16, [0, 1, 2, 3]),
    ] {
        let layout = Layout::with_order(&[2, 24, 9, 10], &order).unwrap();
        let (x, w) = (TensorDesc { dtype, layout }, [72, 24, 3, 3]);
        let w = TensorDesc::contiguous(dtype, &w).unwrap();
        let spec = Conv2dSpec::new(x, w, &Conv2dParams::default()).unwrap();
        for algorithm in Conv2dPlan::algorithms(&spec, options.device) {
            let plan = Conv2dPlan::with_algorithm(&spec, algorithm, &options).unwrap();
            layers.push(Layer { plan, x: upload(1, x), w: upload(2, w), seed: 2 });
        }
    }
    layers
}

/// A run on a stream, with memory that stays until it is done.
struct Run<'a> {
    stream: &'a Stream,
    workspace: Workspace,
    y: DeviceTensor,
}

impl<'a> Run<'a> {
    fn new(layer: &Layer, stream: &'a Stream) -> Self {
        let y = DeviceTensor::new(layer.plan.spec().y, 0).unwrap();
        // SAFETY: the stream outlives the run.
        let workspace = unsafe {
            Workspace::on_stream(0, stream.as_raw(), layer.plan.workspace_bytes()).unwrap()
        };
        Run { stream, workspace, y }
    }

    fn start(&mut self, layer: &Layer, w: Weights<'_>) -> crate::Result<()> {
        let args = Conv2dArgs::new(layer.x.as_ref(), w);
        layer.plan.run(&args, self.y.as_mut()?, &mut self.workspace)
    }

    fn result(&self) -> Vec<f64> {
        self.stream.synchronize().unwrap();
        self.y.to_host().unwrap().as_ref().to_f64_vec().unwrap()
    }

    fn capture(&mut self, layer: &Layer, w: Weights<'_>) -> Graph {
        let stream = self.stream;
        stream.capture(|| self.start(layer, w)).unwrap()
    }
}

impl Layer {
    fn raw(&self, stream: &Stream) -> Vec<f64> {
        let mut run = Run::new(self, stream);
        run.start(self, Weights::Raw(self.w.as_ref())).unwrap();
        run.result()
    }

    fn cached(&self, stream: &Stream, cache: &FilterCache) -> Vec<f64> {
        let mut run = Run::new(self, stream);
        run.start(self, Weights::Cached(self.w.as_ref(), cache)).unwrap();
        run.result()
    }

    /// The result with the cache, which has to be what it is without.
    fn check(&self, stream: &Stream, cache: &FilterCache, what: &str) -> Vec<f64> {
        let (got, want) = (self.cached(stream, cache), self.raw(stream));
        assert!(got == want, "{what}: {}", self.plan.explain());
        got
    }

    /// Other values, by a kernel that writes them through a view of its own.
    fn change(&mut self, stream: &Stream) {
        self.seed += 1;
        let other = upload(self.seed, *self.w.desc());
        copy(&other.as_ref(), &mut self.w.as_mut().unwrap(), stream).unwrap();
        stream.synchronize().unwrap();
    }

    /// Other bytes at the end of the filter, by the copy engine.
    fn change_last(&mut self, stream: &Stream, bytes: &[u8]) {
        let mut pinned = PinnedBuffer::new(stream.gpu(), bytes.len()).unwrap();
        pinned.as_mut_slice().copy_from_slice(bytes);
        let end = self.w.as_ref().address_range().unwrap().1;
        // SAFETY: the end of the filter's memory; the buffer stays until the stream was waited for.
        unsafe { pinned.send((end - bytes.len()) as *mut u8, bytes.len(), stream).unwrap() };
        stream.synchronize().unwrap();
    }
}

#[test]
fn every_change_of_a_filter_is_seen() {
    for mut layer in layers() {
        let cache = FilterCache::default();
        let [stream, other] = [(); 2].map(|()| stream());
        let mut results = vec![layer.check(&stream, &cache, "first")];
        layer.check(&stream, &cache, "unchanged");
        layer.change(&stream);
        results.push(layer.check(&stream, &cache, "by a kernel"));
        layer.change_last(&stream, &[0; 4]);
        results.push(layer.check(&stream, &cache, "one element by a copy"));
        layer.change_last(&stream, &[0, 0, 0, 0x80]);
        layer.check(&stream, &cache, "the sign of a zero");
        layer.change(&other);
        stream.wait(&Event::record(&other).unwrap()).unwrap();
        results.push(layer.check(&stream, &cache, "on another stream"));
        results.push({
            let end = layer.w.as_ref().address_range().unwrap().1;
            // SAFETY: the last element of the filter.
            unsafe { stream.zero((end - 4) as *mut u8, 4).unwrap() };
            layer.check(&stream, &cache, "by setting memory")
        });
        for i in 1..results.len() {
            assert_ne!(results[i], results[i - 1], "change {i} has no effect");
        }
    }
}

#[test]
fn an_unchanged_filter_is_not_packed_again() {
    for mut layer in layers() {
        let (cache, stream) = (FilterCache::default(), stream());
        layer.check(&stream, &cache, "first");
        cache.spoil(&stream);
        let spoiled = layer.cached(&stream, &cache);
        // Others copy the filter, which takes as long as a comparison.
        let algorithm = layer.plan.algorithm();
        if algorithm.is_winograd() || algorithm == Conv2dAlgorithm::ImplicitGemm {
            assert!(spoiled != layer.raw(&stream), "packed again: {}", layer.plan.explain());
            layer.change(&stream);
        }
        layer.check(&stream, &cache, "changed");
    }
}

#[test]
fn streams_do_not_disturb_each_other() {
    for layer in layers() {
        let other = Layer {
            plan: Conv2dPlan::with_algorithm(
                layer.plan.spec(),
                layer.plan.algorithm(),
                &PlanOptions { device: Device::Cuda(0), ..PlanOptions::default() },
            )
            .unwrap(),
            x: upload(1, *layer.x.desc()),
            w: upload(99, *layer.w.desc()),
            seed: 99,
        };
        let cache = FilterCache::default();
        let streams = [(); 2].map(|()| stream());
        let want = [layer.raw(&streams[0]), other.raw(&streams[1])];
        let of = |i: usize| [&layer, &other][i % 2];
        let mut runs: Vec<_> = (0..20).map(|i| Run::new(of(i), &streams[i % 2])).collect();
        for (i, run) in runs.iter_mut().enumerate() {
            run.start(of(i), Weights::Cached(of(i).w.as_ref(), &cache)).unwrap();
        }
        for (i, run) in runs.iter().enumerate() {
            assert!(run.result() == want[i % 2], "{}", layer.plan.explain());
        }
        // Threads that share a stream.
        std::thread::scope(|s| {
            for i in 0..4 {
                let (layer, want) = ([&layer, &other][i % 2], &want[i % 2]);
                let (cache, stream) = (&cache, &streams[0]);
                s.spawn(move || {
                    for _ in 0..10 {
                        assert!(layer.cached(stream, cache) == *want, "{}", layer.plan.explain());
                    }
                });
            }
        });
    }
}

#[test]
fn graphs_own_their_packs() {
    for mut layer in layers() {
        let cache = FilterCache::default();
        let streams = [(); 2].map(|()| stream());
        // One graph after a run, and one before any.
        layer.check(&streams[0], &cache, "before");
        let graphs = [&streams[0], &streams[1]].map(|stream| {
            let mut run = Run::new(&layer, stream);
            let graph = run.capture(&layer, Weights::Cached(layer.w.as_ref(), &cache));
            (run, graph)
        });
        let check = |layer: &Layer, graphs: &[(Run<'_>, Graph)], what: &str| {
            for (run, graph) in graphs {
                // SAFETY: what the graph uses is kept by the run and the layer.
                unsafe { graph.launch(run.stream).unwrap() };
            }
            for (run, _) in graphs {
                assert!(run.result() == layer.raw(run.stream), "{what}: {}", layer.plan.explain());
            }
        };
        check(&layer, &graphs, "first");
        check(&layer, &graphs, "again");
        layer.change(&streams[0]);
        check(&layer, &graphs, "changed");
        layer.check(&streams[1], &cache, "beside the graphs");
        let [first, second] = graphs;
        drop(first);
        drop(cache);
        layer.change(&streams[0]);
        check(&layer, &[second], "without the cache");
    }
}

#[test]
fn a_frozen_filter_is_looked_at_once() {
    for mut layer in layers() {
        let cache = FilterCache::default();
        let [stream, other] = [(); 2].map(|()| stream());
        let first = layer.check(&stream, &cache, "first");
        layer.change(&stream);
        cache.set_frozen(true);
        let frozen = layer.check(&stream, &cache, "what was packed before it was frozen");
        assert_ne!(first, frozen);
        assert!(layer.check(&other, &cache, "another stream") == frozen);
        let in_place = cache.bytes() == 0;
        let mut run = Run::new(&layer, &stream);
        let graph = run.capture(&layer, Weights::Cached(layer.w.as_ref(), &cache));
        // SAFETY: the run and the layer keep what the graph uses.
        unsafe { graph.launch(&stream).unwrap() };
        assert!(run.result() == frozen, "graph: {}", layer.plan.explain());
        drop((run, graph));
        layer.change(&stream);
        if !in_place {
            assert!(layer.cached(&stream, &cache) == frozen, "{}", layer.plan.explain());
            assert!(layer.cached(&other, &cache) == frozen, "{}", layer.plan.explain());
        }
        cache.set_frozen(false);
        cache.set_frozen(true);
        layer.check(&other, &cache, "frozen anew");
        layer.change(&stream);
        cache.set_frozen(false);
        layer.check(&stream, &cache, "thawed");
        layer.check(&other, &cache, "thawed, another stream");
    }
}
