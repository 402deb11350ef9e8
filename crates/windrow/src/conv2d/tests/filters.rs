//! Filters in a cache: every way in which one can change, and many threads.

use super::*;
use crate::FilterCache;
use crate::verification::random_tensor;
use std::sync::Barrier;

const SHAPE: [usize; 4] = [20, 6, 3, 3];
const ALGORITHMS: [Conv2dAlgorithm; 4] = [
    Conv2dAlgorithm::Direct,
    Conv2dAlgorithm::Im2colGemm,
    Conv2dAlgorithm::WinogradGemm(Tile::F4),
    Conv2dAlgorithm::WinogradGemm(Tile::F6),
];

fn f32_desc(shape: &[usize]) -> TensorDesc {
    TensorDesc::contiguous(DType::F32, shape).unwrap()
}

fn plan(w: &TensorDesc, algorithm: Conv2dAlgorithm) -> Conv2dPlan {
    let x = TensorDesc::contiguous(w.dtype, &[2, 6, 9, 10]).unwrap();
    let spec = Conv2dSpec::new(x, *w, &Conv2dParams::default()).unwrap();
    let options = PlanOptions { threads: 2.try_into().ok(), ..Default::default() };
    Conv2dPlan::with_algorithm(&spec, algorithm, &options).unwrap()
}

/// The bytes of y.
fn run(plan: &Conv2dPlan, x: &Tensor, w: Weights<'_>) -> Vec<u8> {
    let mut ws = Workspace::new(Device::Cpu, plan.workspace_bytes_for(&x.as_ref(), &w)).unwrap();
    let mut y = Tensor::uninitialised(plan.spec().y).unwrap();
    plan.run(&Conv2dArgs::new(x.as_ref(), w), y.as_mut(), &mut ws).unwrap();
    y.as_bytes().to_vec()
}

fn input(plan: &Conv2dPlan) -> Tensor {
    random_tensor(7, plan.spec().x, -1.0, 1.0).unwrap()
}

/// Runs with the cache and without, and expects the same; gives it.
fn check(plan: &Conv2dPlan, w: &TensorRef<'_>, cache: &FilterCache) -> Vec<u8> {
    let x = input(plan);
    let got = run(plan, &x, Weights::Cached(*w, cache));
    assert_eq!(got, run(plan, &x, Weights::Raw(*w)), "{}", plan.algorithm());
    got
}

#[test]
fn what_is_packed_is_used_until_the_filter_changes() {
    for algorithm in ALGORITHMS {
        let cache = FilterCache::new();
        let mut w = random_tensor(1, f32_desc(&SHAPE), -1.0, 1.0).unwrap();
        let plan = plan(w.desc(), algorithm);
        let first = check(&plan, &w.as_ref(), &cache);
        let bytes = cache.bytes();
        assert!(bytes >= SHAPE.iter().product::<usize>() * 4);
        assert_eq!(plan.kept_bytes(&w.as_ref()), plan.packed_bytes());
        assert_eq!(first, check(&plan, &w.as_ref(), &cache));
        assert_eq!(bytes, cache.bytes());
        // One element, its last bit but some: written in place, at the same address.
        w.as_bytes_mut()[4 * 77 + 1] ^= 0x40;
        assert_ne!(first, check(&plan, &w.as_ref(), &cache));
        assert_eq!(bytes, cache.bytes(), "what is stale is dropped");
        w.as_bytes_mut()[4 * 77 + 1] ^= 0x40;
        assert_eq!(first, check(&plan, &w.as_ref(), &cache));
        cache.clear();
        assert_eq!(cache.bytes(), 0);
        assert_eq!(first, check(&plan, &w.as_ref(), &cache));
    }
}

#[test]
fn writes_through_a_view_and_swapped_elements_are_seen() {
    let cache = FilterCache::new();
    let mut w = random_tensor(1, f32_desc(&SHAPE), -1.0, 1.0).unwrap();
    let plan = plan(w.desc(), Conv2dAlgorithm::WinogradGemm(Tile::F4));
    let mut before = check(&plan, &w.as_ref(), &cache);
    let size = SHAPE.iter().product::<usize>() * 4;
    type Write<'a> = &'a dyn Fn(&mut [u8]);
    let writes: [Write<'_>; 5] = [
        &|w| {
            let reversed: Vec<u8> = w.chunks_exact(4).rev().flatten().copied().collect();
            w.copy_from_slice(&reversed);
        },
        &|w| w.copy_within(0..size / 2, size / 2),
        &|w| w[..36].rotate_left(4),
        &|w| w.chunks_exact_mut(4).for_each(|x| x[3] ^= 0x80),
        &|w| w.fill(0),
    ];
    for write in writes {
        write(w.as_bytes_mut());
        let after = check(&plan, &w.as_ref(), &cache);
        assert_ne!(before, after);
        before = after;
    }
    // As the result of another operator, written in place.
    let spec = crate::GeluSpec::new(*w.desc(), crate::Approximate::None).unwrap();
    w.as_bytes_mut().copy_from_slice(&1f32.to_ne_bytes().repeat(size / 4));
    let before = check(&plan, &w.as_ref(), &cache);
    let (gelu, values) = (crate::GeluPlan::new(&spec, &PlanOptions::default()).unwrap(), w);
    let mut w = Tensor::uninitialised(spec.y).unwrap();
    let args = crate::GeluArgs { x: values.as_ref(), bias: None, gate: None };
    gelu.run(&args, w.as_mut(), &mut Workspace::empty()).unwrap();
    assert_ne!(before, check(&plan, &w.as_ref(), &cache));
}

#[test]
fn another_filter_at_the_same_address_is_seen_and_the_same_elsewhere_is_not() {
    let cache = FilterCache::new();
    let first = random_tensor(1, f32_desc(&SHAPE), -1.0, 1.0).unwrap();
    let second = random_tensor(2, f32_desc(&SHAPE), -1.0, 1.0).unwrap();
    let plan = plan(first.desc(), Conv2dAlgorithm::WinogradGemm(Tile::F6));
    let mut memory = [first.to_vec::<f32>().unwrap(), second.to_vec::<f32>().unwrap()].concat();
    let len = memory.len() / 2;
    let y = check(&plan, &TensorRef::new(&memory[..len], &SHAPE).unwrap(), &cache);
    // Freed and allocated again, as far as the cache can tell.
    memory.rotate_left(len);
    assert_ne!(y, check(&plan, &TensorRef::new(&memory[..len], &SHAPE).unwrap(), &cache));
    assert_eq!(y, check(&plan, &TensorRef::new(&memory[len..], &SHAPE).unwrap(), &cache));
}

/// Plans with other algorithms, tiles, types and layouts have forms of their own.
#[test]
fn forms_do_not_meet() {
    let cache = FilterCache::new();
    for round in 0..3 {
        for dtype in [DType::F32, DType::BF16] {
            for form in ARRANGEMENTS {
                // The bytes of one layout are another filter in another.
                let w = Strided::new(dtype, layout(&SHAPE, form), round / 2);
                let view = w.view();
                for algorithm in ALGORITHMS {
                    check(&plan(view.desc(), algorithm), &view, &cache);
                }
            }
        }
    }
    let square = [6, 6, 3, 3];
    let w = random_tensor(3, f32_desc(&square), -1.0, 1.0).unwrap();
    // SAFETY: a permutation of the same elements.
    let transposed = unsafe { w.as_ref().with_layout(w.desc().layout.permute(&[1, 0, 2, 3])) };
    for w in [w.as_ref(), transposed, w.as_ref()] {
        check(&plan(w.desc(), Conv2dAlgorithm::Direct), &w, &cache);
    }
}

#[test]
fn the_cache_is_bounded() {
    let cache = FilterCache::new();
    let tiles = Tile::ALL.map(Conv2dAlgorithm::WinogradGemm);
    let mut most = 0;
    for round in 0..4 {
        for form in ARRANGEMENTS {
            let w = Strided::new(DType::F32, layout(&SHAPE, form), round);
            for algorithm in tiles {
                check(&plan(w.view().desc(), algorithm), &w.view(), &cache);
                most = most.max(cache.bytes());
            }
        }
    }
    // Eight forms of the largest tile, channels padded to the widest vector.
    assert!(most <= 8 * 64 * 6 * 32 * 4, "{most}");
}

/// A frozen filter's content is compared once, and again after it was thawed.
#[test]
fn frozen_filters_are_compared_once() {
    for algorithm in ALGORITHMS {
        let cache = FilterCache::new();
        let mut w = random_tensor(1, f32_desc(&SHAPE), -1.0, 1.0).unwrap();
        let plan = plan(w.desc(), algorithm);
        let x = input(&plan);
        check(&plan, &w.as_ref(), &cache);
        // What was packed earlier is not trusted without a look.
        w.as_bytes_mut().fill(0x3f);
        assert!(!cache.is_frozen());
        cache.set_frozen(true);
        assert!(cache.is_frozen());
        let frozen = check(&plan, &w.as_ref(), &cache);
        w.as_bytes_mut().fill(0x3e);
        assert_eq!(frozen, run(&plan, &x, Weights::Cached(w.as_ref(), &cache)), "{algorithm}");
        cache.set_frozen(false);
        assert_ne!(frozen, check(&plan, &w.as_ref(), &cache));
        // Frozen before anything was packed.
        cache.clear();
        cache.set_frozen(true);
        check(&plan, &w.as_ref(), &cache);
    }
}

#[test]
fn threads_that_come_first_together_agree() {
    let w = random_tensor(1, f32_desc(&[64, 6, 3, 3]), -1.0, 1.0).unwrap();
    let plan = plan(w.desc(), Conv2dAlgorithm::WinogradGemm(Tile::F4));
    let x = input(&plan);
    let want = run(&plan, &x, Weights::Raw(w.as_ref()));
    for frozen in [false, true] {
        let (cache, start) = (FilterCache::new(), Barrier::new(32));
        cache.set_frozen(frozen);
        std::thread::scope(|scope| {
            for i in 0..32 {
                let (cache, start, plan, x, w, want) = (&cache, &start, &plan, &x, &w, &want);
                scope.spawn(move || {
                    start.wait();
                    for call in 0..8 {
                        assert_eq!(*want, run(plan, x, Weights::Cached(w.as_ref(), cache)));
                        if (i + call) % 11 == 0 {
                            cache.clear();
                        }
                    }
                });
            }
        });
        run(&plan, &x, Weights::Cached(w.as_ref(), &cache));
        let one = plan.pack_weights(&w.as_ref(), &mut Workspace::empty()).unwrap();
        assert_eq!(cache.bytes(), one.bytes());
    }
}

/// Two filters in turn in one cache: not what it is for, and right.
#[test]
fn threads_with_different_filters_do_not_mix() {
    let filters = [1, 2].map(|seed| random_tensor(seed, f32_desc(&SHAPE), -1.0, 1.0).unwrap());
    let plan = plan(filters[0].desc(), Conv2dAlgorithm::WinogradGemm(Tile::F2));
    let (x, cache) = (input(&plan), FilterCache::new());
    std::thread::scope(|scope| {
        for i in 0..8 {
            let (cache, plan, x, w) = (&cache, &plan, &x, &filters[i % 2]);
            scope.spawn(move || {
                let want = run(plan, x, Weights::Raw(w.as_ref()));
                for _ in 0..20 {
                    assert_eq!(want, run(plan, x, Weights::Cached(w.as_ref(), cache)));
                }
            });
        }
    });
}

#[test]
fn errors_name_what_is_wrong() {
    let w = random_tensor(1, f32_desc(&SHAPE), -1.0, 1.0).unwrap();
    let plan = plan(w.desc(), Conv2dAlgorithm::WinogradGemm(Tile::F4));
    let (x, cache) = (input(&plan), FilterCache::new());
    let mut y = Tensor::uninitialised(plan.spec().y).unwrap();
    let other = random_tensor(1, f32_desc(&[20, 6, 3, 4]), -1.0, 1.0).unwrap();
    let mut run = |w, ws: &mut Workspace| {
        plan.run(&Conv2dArgs::new(x.as_ref(), w), y.as_mut(), ws).unwrap_err()
    };
    let mut ws = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let error = run(Weights::Cached(other.as_ref(), &cache), &mut ws);
    assert!(matches!(error, Error::Shape { arg: "w", .. }), "{error}");
    let error = run(Weights::Cached(w.as_ref(), &cache), &mut Workspace::empty());
    assert!(matches!(error, Error::WorkspaceTooSmall { .. }), "{error}");
    assert_eq!(cache.bytes(), 0);
}

/// A plan that verifies compares with the filter itself, so that it notices a broken promise.
#[test]
fn verification_sees_a_filter_that_changed_though_frozen() {
    let mut w = random_tensor(1, f32_desc(&SHAPE), -1.0, 1.0).unwrap();
    let mut plan = plan(w.desc(), Conv2dAlgorithm::WinogradGemm(Tile::F4));
    plan.options.verify = Verify::On;
    let cache = FilterCache::new();
    cache.set_frozen(true);
    check(&plan, &w.as_ref(), &cache);
    w.as_bytes_mut()[..4].copy_from_slice(&9f32.to_ne_bytes());
    let mut ws = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let mut y = Tensor::uninitialised(plan.spec().y).unwrap();
    let x = input(&plan);
    let args = Conv2dArgs::new(x.as_ref(), Weights::Cached(w.as_ref(), &cache));
    let error = plan.run(&args, y.as_mut(), &mut ws).unwrap_err();
    assert!(matches!(error, Error::Verification { .. }), "{error}");
}

/// Methods that have the same name for a user, of several instruction sets, with one cache.
#[test]
fn packed_filters_belong_to_a_method() {
    let bf16 = |shape: &[usize], order: &[usize]| TensorDesc {
        dtype: DType::BF16,
        layout: Layout::with_order(shape, order).unwrap(),
    };
    let x = bf16(&[3, 7, 16, 21], &[0, 2, 3, 1]);
    let x = random_tensor(1, x, -1.0, 1.0).unwrap();
    let w = random_tensor(2, bf16(&[32, 7, 1, 1], &[0, 1, 2, 3]), -1.0, 1.0).unwrap();
    let params = Conv2dParams::default().with_stride([2, 2]);
    let spec = Conv2dSpec::new(*x.desc(), *w.desc(), &params).unwrap();
    let configuration = Conv2dConfiguration::new(Conv2dAlgorithm::Direct);
    let cache = FilterCache::new();
    for isa in Isa::available() {
        let options = PlanOptions::default();
        let plan = Conv2dPlan::on_isa(&spec, &configuration, &options, isa).unwrap();
        let run = |weights: Weights<'_>| {
            let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
            let mut y = Tensor::uninitialised(spec.y).unwrap();
            plan.run(&Conv2dArgs::new(x.as_ref(), weights), y.as_mut(), &mut workspace).unwrap();
            y.as_ref().to_f64_vec().unwrap()
        };
        let raw = run(Weights::Raw(w.as_ref()));
        assert_eq!(run(Weights::Cached(w.as_ref(), &cache)), raw, "{}", isa.name());
    }
}
