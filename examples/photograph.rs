//! A photograph through both convolutions: conv2d draws its edges, causal conv1d along the rows
//! leaves a trail behind everything bright.
//!
//! ```text
//! cargo run --release --example photograph -- FOLDER
//! ```
//!
//! writes `edges.png` and `trails.png`, and the tensors for doing the same with `windrow run`
//! (`photograph.sh`). The photograph is read where it lies: its interleaved bytes become f32 once,
//! and from there a batch of one image and a batch of rows are two stride patterns.

use image::RgbImage;
use std::error::Error;
use std::path::{Path, PathBuf};
use windrow::{Activation, Conv2dParams, Layout, Tensor, TensorRef, causal_conv1d, conv2d};
use windrow_cli::files;

/// Taps of the trail.
const WIDTH: usize = 40;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| ".".into()));
    let photograph = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/rocket.jpg");
    let photograph = image::open(photograph)?.to_rgb8();
    let (width, height) = (photograph.width() as usize, photograph.height() as usize);
    let pixels: Vec<f32> = photograph.iter().map(|&v| f32::from(v) / 255.0).collect();

    // [n, c, h, w] in channels-last memory.
    let layout = Layout::with_order(&[1, 3, height, width], &[0, 2, 3, 1])?;
    let x = TensorRef::strided(&pixels, 0, layout)?;
    let laplace = Tensor::from_slice(&laplace(), &[3, 3, 3, 3])?;
    let params = Conv2dParams::default().with_padding([1, 1]).with_activation(Activation::Relu);
    let edges = conv2d(&x, &laplace.as_ref(), None, &params)?;
    save(&folder.join("edges.png"), edges.permute(&[0, 2, 3, 1]))?;

    // [b, d, l]: a sequence for each row, its channels the colours.
    let layout = Layout::with_order(&[height, 3, width], &[0, 2, 1])?;
    let rows = TensorRef::strided(&pixels, 0, layout)?;
    let decay = Tensor::from_slice(&decay(), &[3, WIDTH])?;
    let trails = causal_conv1d(&rows, &decay.as_ref(), None, Activation::Identity)?;
    save(&folder.join("trails.png"), trails.permute(&[0, 2, 1]))?;

    let image = Tensor::from_slice(&pixels, &[1, height, width, 3])?;
    let rows = Tensor::from_slice(&pixels, &[height, width, 3])?;
    files::write(&[
        (&folder.join("image.npy"), "image", &image),
        (&folder.join("laplace.npy"), "laplace", &laplace),
        (&folder.join("rows.npy"), "rows", &rows),
        (&folder.join("decay.npy"), "decay", &decay),
    ])?;
    Ok(())
}

/// [k, c, r, s]: the Laplacian of each colour on its own, made brighter.
fn laplace() -> Vec<f32> {
    let tap = |i: usize| if i == 4 { 16.0 } else { -2.0 };
    (0..3 * 3 * 9).map(|i| if i / 27 == i / 9 % 3 { tap(i % 9) } else { 0.0 }).collect()
}

/// [d, width]: weights that fall off into the past and sum to one.
fn decay() -> Vec<f32> {
    let age = |tap: usize| (WIDTH - 1 - tap) as f32;
    let one: Vec<f32> = (0..WIDTH).map(|tap| (-age(tap) / 12.0).exp()).collect();
    let sum: f32 = one.iter().sum();
    one.iter().map(|w| w / sum).cycle().take(3 * WIDTH).collect()
}

/// Writes [.., h, w, 3] as PNG.
fn save(path: &Path, tensor: Tensor) -> Result<(), Box<dyn Error>> {
    let [.., height, width, _] = *tensor.shape() else { return Err("not an image".into()) };
    let bytes = tensor.to_vec::<f32>()?.iter().map(|v| (v * 255.0).round() as u8).collect();
    let image = RgbImage::from_raw(width as u32, height as u32, bytes).ok_or("not an image")?;
    image.save(path)?;
    println!("{}", path.display());
    Ok(())
}
